"""Training a head from end to end on the golden target: it learns, resumes exactly, and refuses what it can't use."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decoding import DraftscopeError, UsageError, generate
from decoding.accept import Draws
from decoding.engine import Settings
from heads import load_head
from heads.training import train as training
from heads.training.data import Dialogue, write_meta
from heads.training.features import prepare_features
from heads.training.train import Trainer, recipe_for, train

FAST = {"batch_tokens": 256, "epochs": 2, "learning_rate": 3e-3, "noise": 0.01}


@pytest.fixture(scope="module")
def text(tiny_target, tmp_path_factory) -> Path:
    """Dialogues that the golden target wrote: random openings, sampled answers."""
    folder = tmp_path_factory.mktemp("text")
    write_meta(folder, tiny_target)
    draws = Draws(0)
    lines = []
    for number in range(40):
        prompt = torch.randint(0, 256, (8 + number % 5,), generator=torch.Generator().manual_seed(number)).tolist()
        out = generate(tiny_target, None, prompt, Settings(max_new_tokens=40, temperature=0.7), draws=draws).output_ids
        lines.append(Dialogue("test", 0.7, prompt + out, [(len(prompt), len(prompt) + len(out))]).to_json())
    (folder / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["eagle", "hass", "koala-eagle", "hass-koala"])
def test_a_trained_head_drafts_better_than_it_began(method: str, tiny_target, text, tmp_path) -> None:
    recipe = recipe_for(method, **{**FAST, "epochs": 6}, draft_vocab=200)
    store = prepare_features(tiny_target, [text])
    before = Trainer(tiny_target, recipe, store, tmp_path).evaluate()
    after = train(tiny_target, recipe, [text], tmp_path)
    assert after["top1"][0] > before["top1"][0] + 0.05
    head = load_head(str(tmp_path), tiny_target)
    assert (head.info.method, head.info.layers, head.info.align_steps) == (method, recipe.layers, recipe.align_steps)
    assert head.info.draft_vocab_size == 200 and head.info.tokens_seen > 0
    prompt = list(range(10, 20))
    plain = generate(tiny_target, None, prompt, Settings(max_new_tokens=40))
    assert generate(tiny_target, head, prompt, Settings(max_new_tokens=40)).output_ids == plain.output_ids
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry for entry in log if "held_out" in entry]


def test_same_seed_same_weights_and_resumed_equals_uninterrupted(tiny_target, text, tmp_path, monkeypatch) -> None:
    recipe = recipe_for("hass-koala", **FAST)
    for name in ("one", "two"):
        train(tiny_target, recipe, [text], tmp_path / name)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    train(tiny_target, recipe_for("hass-koala", **FAST, seed=1), [text], tmp_path / "seed")
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "seed"))

    store = prepare_features(tiny_target, [text])
    whole = len(Trainer(tiny_target, recipe, store, tmp_path)._batches(0))
    for killed_after in (1, whole, whole + 2):  # in the first epoch, at its end, in the second
        out = tmp_path / f"killed{killed_after}"
        steps = 0
        original = Trainer._train_step

        def dying(self, dialogues, original=original, limit=killed_after):
            nonlocal steps
            if steps == limit:
                raise KeyboardInterrupt
            steps += 1
            return original(self, dialogues)

        monkeypatch.setattr(Trainer, "_train_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_target, recipe, [text], out, checkpoint_minutes=0)
        monkeypatch.undo()
        monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "cache"))
        train(tiny_target, recipe, [text], out)
        assert same(weights(tmp_path / "one"), weights(out))


def test_refusals(tiny_target, text, tmp_path, monkeypatch) -> None:
    recipe = recipe_for("eagle", **FAST)
    with pytest.raises(UsageError, match="holds no training text"):
        train(tiny_target, recipe, [tmp_path], tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    (other / "meta.json").write_text(json.dumps({"schema": "draftscope.text/1", "target": "another", "vocab_size": 257}))
    with pytest.raises(UsageError, match="text of target another"):
        train(tiny_target, recipe, [other], tmp_path / "out")
    small = tmp_path / "small"
    small.mkdir()
    write_meta(small, tiny_target)
    with pytest.raises(UsageError, match="no assistant turns"):
        train(tiny_target, recipe, [small], tmp_path / "out")
    (small / "dialogues.jsonl").write_text(Dialogue("x", 0.0, [1, 2, 3], [(1, 3)]).to_json() + "\n")
    with pytest.raises(UsageError, match="too little"):
        train(tiny_target, recipe, [small], tmp_path / "out")
    (small / "dialogues.jsonl").write_text("{}\n")
    with pytest.raises(DraftscopeError, match="line 1 is not a dialogue"):
        train(tiny_target, recipe, [small], tmp_path / "out")
    with pytest.raises(UsageError, match="unknown method 'magic'"):
        recipe_for("magic")
    with pytest.raises(UsageError, match="--layers is at least 1"):
        recipe_for("eagle", layers=0)
    assert not (tmp_path / "out" / "model.safetensors").exists()

    train(tiny_target, recipe, [text], tmp_path / "kept")
    with pytest.raises(UsageError, match=r"another training \(.*method.*differ\)"):
        train(tiny_target, recipe_for("hass", **FAST), [text], tmp_path / "kept")

    kept = weights(tmp_path / "kept")
    monkeypatch.setattr(training, "step_loss", lambda *a: training_nan(kept))
    with pytest.raises(DraftscopeError, match="loss is not a number"):
        train(tiny_target, recipe_for("eagle", **{**FAST, "epochs": 3}), [text], tmp_path / "nan")
    assert not (tmp_path / "nan" / "model.safetensors").exists()


def training_nan(kept):
    from heads.training.losses import StepLoss

    return StepLoss(next(iter(kept.values())).float().sum() * float("nan"), 0.0, 0.0, 0.0, 0.0)


def test_a_full_disk_keeps_the_checkpoint(tiny_target, text, tmp_path, monkeypatch) -> None:
    recipe = recipe_for("eagle", **FAST)
    store = prepare_features(tiny_target, [text])
    trainer = Trainer(tiny_target, recipe, store, tmp_path)
    trainer.save()
    saved = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state, path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DraftscopeError, match="No space left"):
        trainer.save()
    assert (tmp_path / "checkpoint.pt").read_bytes() == saved
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_cut_last_line_is_dropped_and_repaired(tiny_target, text, tmp_path) -> None:
    from heads.training.data import read_dialogues

    path = tmp_path / "dialogues.jsonl"
    write_meta(tmp_path, tiny_target)
    whole = (text / "dialogues.jsonl").read_bytes()
    path.write_bytes(whole + b'{"kind": "te')
    assert len(list(read_dialogues(tmp_path, tiny_target))) == 40
    assert path.read_bytes() != whole
    assert len(list(read_dialogues(tmp_path, tiny_target, repair=True))) == 40
    assert path.read_bytes() == whole


def test_features_resume_where_they_stopped(tiny_target, text, tmp_path, monkeypatch) -> None:
    from heads.training import features

    monkeypatch.setattr(features, "BATCH_TOKENS", 256)
    monkeypatch.setattr(features, "FLUSH_EVERY", 1)
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "whole"))
    whole = prepare_features(tiny_target, [text]).features
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "killed"))
    calls, original = 0, tiny_target.model.model.forward

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(tiny_target.model.model, "forward", dying)
    with pytest.raises(KeyboardInterrupt):
        prepare_features(tiny_target, [text])
    before = calls
    resumed = prepare_features(tiny_target, [text]).features
    assert (resumed == whole).all()
    total = json.loads(next((tmp_path / "killed").rglob("progress.json")).read_text())["of"]
    assert calls - before == total - 2, "what was computed is not computed again"
