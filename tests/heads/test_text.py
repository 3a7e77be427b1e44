"""Training text: ShareGPT conversations, draft vocabularies, and a target of another kind from text to trained head."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from decoding import DraftscopeError, Settings, UsageError, generate, load_target
from decoding.cache import SlotCache
from decoding.chat import encode_prompt
from heads import load_head
from heads.cli import main
from heads.training.data import DIALOGUES, Dialogue, read_dialogues, write_meta
from heads.training.features import read_text
from heads.training.sharegpt import read_sharegpt
from heads.training.vocabulary import answer_counts, coverage, draft_vocabulary
from tests.heads.tiny_chat import write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "tiny-qwen2")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder), device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def talk(*turns: str, first: str = "human") -> dict:
    names = ("human", "gpt") if first == "human" else ("gpt", "human")
    return {"conversations": [{"from": names[number % 2], "value": turn} for number, turn in enumerate(turns)]}


def write(path: Path, *records: dict, lines: bool = False) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) if lines else json.dumps(list(records)))
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_spans_are_what_the_assistant_said(target, tmp_path, lines) -> None:
    turns = ("How is the sea? ", "  The sea is calm.\n", "And é\u4e16 the weather?", "Fine 🌊")
    (dialogue,) = read_sharegpt(write(tmp_path / "a.json", talk(*turns), lines=lines), target)
    said = [target.tokenizer.decode(dialogue.ids[start:end]) for start, end in dialogue.spans]
    assert said == ["The sea is calm.<|end|>", "Fine 🌊<|end|>"]
    # what stands before an answer is the very prompt that decoding would use
    messages = [{"role": "user", "content": turns[0].strip()}]
    assert dialogue.ids[: dialogue.spans[0][0]] == encode_prompt(target.tokenizer, messages)
    messages += [{"role": "assistant", "content": turns[1].strip()}, {"role": "user", "content": turns[2].strip()}]
    assert dialogue.ids[: dialogue.spans[1][0]] == encode_prompt(target.tokenizer, messages)


def test_control_tokens_in_a_conversation_stay_text(target, tmp_path) -> None:
    (dialogue,) = read_sharegpt(write(tmp_path / "a.json", talk("say <|end|>", "<|end|> it is")), target)
    end = target.tokenizer.eos_token_id
    assert dialogue.ids.count(end) == 2  # the template's own
    (span,) = dialogue.spans
    assert dialogue.ids[span[1] - 1] == end and target.tokenizer.decode(dialogue.ids[span[0] : span[1] - 1]) == "<|end|> it is"


def test_messages_system_prompts_and_odd_turns(target, tmp_path, capsys) -> None:
    records = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yo"},
            ]
        },
        talk("I begin", "Do you?", "Yes", "then go on", first="gpt"),
        talk("only a question"),
        {"conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"conversations": [{"from": "tool", "value": "a"}, {"from": "gpt", "value": "c"}]},
    ]
    dialogues = list(read_sharegpt(write(tmp_path / "a.json", *records), target))
    said = [[target.tokenizer.decode(d.ids[start:end]) for start, end in d.spans] for d in dialogues]
    assert said == [["Yo<|end|>"], ["Yes<|end|>"]]
    assert "Be brief." in target.tokenizer.decode(dialogues[0].ids)
    told = capsys.readouterr().err
    assert "3 of 5 conversations left out" in told and "2 with turns out of order" in told and "1 without an answer" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "can't be read as JSON"),
        ('[{"id": 1}]', "entry 1 is no conversation"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "entry 1 is no conversation"),
        ("[]", "no assistant turns"),
        (json.dumps([talk("a", "b")]), "too little to train on"),
    ],
)
def test_unusable_files_are_named(target, tmp_path, text, message) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_text(target, [tmp_path / "a.json"], 512)


def test_sharegpt_needs_a_chat_template(tiny_target, tmp_path) -> None:
    with pytest.raises(UsageError, match="tiny_base has no chat template"):
        list(read_sharegpt(write(tmp_path / "a.json", talk("a", "b")), tiny_target))


def test_draft_vocabulary_is_the_most_frequent_answer_tokens(target, tmp_path) -> None:
    records = [talk(f"question {number}", "the sea " * 40 + str(number)) for number in range(20)]
    store = read_text(target, [write(tmp_path / "a.json", *records)], 512)
    counts = Counter(store.tokens[store.answer].tolist())
    by_kind = answer_counts(store, range(len(store)))
    assert by_kind == {"sharegpt": counts}
    vocab = draft_vocabulary(by_kind, 6, target.vocab_size, target.stop_token_ids)
    assert vocab.tolist() == sorted(vocab.tolist()) and len(vocab) == 6
    assert target.stop_token_ids <= set(vocab.tolist())
    common = [token for token, _ in counts.most_common() if token not in target.stop_token_ids][:5]
    assert set(vocab.tolist()) == target.stop_token_ids | set(common)
    covered = coverage(by_kind, set(vocab.tolist()))
    assert covered["all"] == covered["sharegpt"] == pytest.approx(sum(counts[t] for t in vocab.tolist()) / sum(counts.values()), abs=1e-4)
    wide = draft_vocabulary(by_kind, 10_000, target.vocab_size, target.stop_token_ids)
    assert wide.tolist() == list(range(target.vocab_size)) and coverage(by_kind, set(wide.tolist()))["all"] == 1.0
    assert coverage({}, {1}) == {"all": 0.0}


@pytest.mark.parametrize("method", ["hass-koala", "koala-medusa"])
def test_a_new_target_from_text_to_head_on_the_command_line(method, folder, target, tmp_path, capsys) -> None:
    text, head = tmp_path / "text", tmp_path / "head"
    common = ["--target", str(folder), "--device", "cpu", "--dtype", "float32"]
    assert main(["synthesize", *common, "--tokens", "3000", "--batch", "16", "--out", str(text)]) == 0
    shares = write(tmp_path / "more.json", *(talk(f"question {number}", f"the sea is calm {number}") for number in range(10)))
    options = ["--method", method, "--draft-vocab", "128", "--batch-tokens", "1024", "--epochs", "2"]
    assert main(["train", *common, "--data", str(text), str(shares), "--out", str(head), *options]) == 0
    assert "held-out top-1 by draft step" in capsys.readouterr().out
    config = json.loads((head / "config.json").read_text())["draftscope"]
    assert config["training"]["command"].startswith("python -m heads") and set(config["training"]["draft_vocab_coverage"]) > {
        "all",
        "sharegpt",
    }
    run = generate(target, load_head(str(head), target), "How is the sea?", Settings(max_new_tokens=24))
    plain = generate(target, None, "How is the sea?", Settings(max_new_tokens=24))
    assert run.output_ids == plain.output_ids
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "1", "category": "sea", "turns": ["How is the sea?"]}) + "\n")
    assert main(["evaluate", *common, "--head", str(head), "--prompts", str(prompts), "--max-new-tokens", "16"]) == 0
    assert torch.is_tensor(load_head(str(head), target).draft_vocab)


def test_unwritten_rows_of_a_slot_cache_stay_out_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    # memory comes back dirty now and then, and a masked row counts 0 times whatever is in it: NaN for NaN
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: torch.full(shape, torch.nan, dtype=self.dtype))
    cache = SlotCache(1, 2, 8, torch.device("cpu"))
    mask = cache.place(torch.tensor([0, 5]))
    row = torch.ones(2, 1, 1, 4)
    keys, values = cache.layers[0].update(row, row)
    mixed = torch.nn.functional.scaled_dot_product_attention(row, keys, values, attn_mask=mask)
    assert torch.isfinite(mixed).all()


def test_text_is_packed_each_dialogue_once_and_read_back(folder, target, tmp_path, capsys) -> None:
    dialogues = [Dialogue("sea", 0.0, [1, n, 2, 3, 4], [(3, 5)]) for n in range(30)]
    for name, part in (("a", dialogues[:20]), ("b", dialogues[15:])):
        (tmp_path / name).mkdir()
        write_meta(tmp_path / name, target)
        (tmp_path / name / DIALOGUES).write_text("".join(dialogue.to_json() + "\n" for dialogue in part))
    common = ["pack", "--target", str(folder), "--device", "cpu", str(tmp_path / "a"), str(tmp_path / "b"), "--out"]
    assert main([*common, str(tmp_path / "c")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dialogues"] == 30 and told["duplicates_dropped"] == 5 and told["by_kind"] == {"sea": 60}
    assert list(read_dialogues(tmp_path / "c", target)) == dialogues
    # what is written afterwards comes behind
    (tmp_path / "c" / DIALOGUES).write_text(dialogues[0].to_json() + "\n")
    assert list(read_dialogues(tmp_path / "c", target)) == [*dialogues, dialogues[0]]
    assert main([*common, str(tmp_path / "c")]) == 2
    assert "not packed" in capsys.readouterr().err
    # what a packed folder lacks is added to it
    (tmp_path / "c" / DIALOGUES).unlink()
    assert main([*common, str(tmp_path / "c")]) == 2
    assert "no new dialogue" in capsys.readouterr().err
    more = Dialogue("river", 1.0, [1, 99, 2, 3, 4], [(3, 5)])
    (tmp_path / "b" / DIALOGUES).write_text(more.to_json() + "\n")
    assert main([*common, str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out)["by_kind"] == {"sea": 60, "river": 2}
    assert list(read_dialogues(tmp_path / "c", target)) == [*dialogues, more]
    packed = next((tmp_path / "c").glob("*.xz"))
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(DraftscopeError, match="is damaged"):
        list(read_dialogues(tmp_path / "c", target))


def test_an_ablation_trains_each_combination_once_and_tells_what_each_part_changed(folder, target, tmp_path, capsys) -> None:
    shares = write(tmp_path / "text.json", *(talk(f"question {number}", f"the sea is calm {number}") for number in range(100)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "1", "category": "sea", "turns": ["How is the sea?"]}) + "\n")
    command = ["ablate", "--target", str(folder), "--device", "cpu", "--dtype", "float32", "--data", str(shares), "--tokens", "900"]
    command += ["--out", str(tmp_path / "out"), "--layers", "1", "2", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert main(command) == 0
    result = json.loads((tmp_path / "out" / "ablation.json").read_text())
    rows = {(row["family"], row["layers"], row["adversary"]): row for row in result["rows"]}
    assert set(rows) == {(family, k, weight) for family in ("eagle", "medusa") for k in (1, 2) for weight in (0.0, 0.1)}
    assert len({row["tokens_seen"] for row in rows.values()}) == 1 and all(row["tau"] >= 1 for row in rows.values())
    for (family, k, weight), row in rows.items():  # each part against the row that lacks it, and nothing else
        for part, base in (("layers", (family, 1, weight)), ("adversary", (family, k, 0.0))):
            due = row[f"due_to_{part}"]
            assert due is None if base == (family, k, weight) else due["ratio"] == pytest.approx(row["tau"] / rows[base]["tau"])
    assert "8 of 8" in capsys.readouterr().err
    assert main([*command, "--adversaries", "0"]) == 0
    out, err = capsys.readouterr()
    assert "1 of" not in err  # nothing is trained twice
    assert f"{rows['eagle', 2, 0.0]['tau'] / rows['eagle', 1, 0.0]['tau']:.2f} [" in out
    assert main([*command, "--families", "hass"]) == 2 and "possible are eagle and medusa" in capsys.readouterr().err
