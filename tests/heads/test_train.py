"""Training a head from end to end on the golden target: it learns, resumes exactly, and refuses what it can't use."""

import json
import os
import subprocess
import sys
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
from heads.training.recipe import METHODS, recipe_for
from heads.training.train import Trainer, train

GOLDEN = Path(__file__).parent.parent / "golden"
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


def steps_logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_head_drafts_better_than_it_began(method: str, tiny_target, text, tmp_path) -> None:
    # a MedusaHead starts with every token equally unlikely; a FeatureHead with the best linear guess
    changes = {"epochs": 40, "learning_rate": 1e-2} if "medusa" in method else {"epochs": 8}
    recipe = recipe_for(method, **{**FAST, **changes}, draft_vocab=200)
    store = prepare_features(tiny_target, [text])
    before = Trainer(tiny_target, recipe, store, tmp_path).evaluate()
    after = train(tiny_target, recipe, [text], tmp_path)
    assert after.top1[0] > before.top1[0] + 0.05
    head = load_head(str(tmp_path), tiny_target)
    assert (head.info.method, head.info.layers, head.info.adversary) == (method, recipe.layers, recipe.adversary > 0)
    assert head.info.draft_vocab_size == 200 and head.info.tokens_seen > 0
    prompt = list(range(10, 20))
    plain = generate(tiny_target, None, prompt, Settings(max_new_tokens=40))
    assert generate(tiny_target, head, prompt, Settings(max_new_tokens=40)).output_ids == plain.output_ids
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert log[-1]["held_out"]["top1"] == after.top1 and log[-1]["held_out"]["by_kind"]["test"] == after.top1[0]
    assert len([entry for entry in log if "held_out" in entry]) > 3
    judged = [entry for entry in log if "discriminator" in entry]
    assert bool(judged) == (recipe.adversary > 0)
    assert all(0 <= share <= 1 for entry in judged for share in entry["real_recognised"] + entry["fake_recognised"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_same_seed_same_weights_and_resumed_equals_uninterrupted(optimizer, tiny_target, text, tmp_path, monkeypatch) -> None:
    recipe = recipe_for("hass-koala", **FAST, optimizer=optimizer)
    for name in ("one", "two"):
        train(tiny_target, recipe, [text], tmp_path / name)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    train(tiny_target, recipe_for("hass-koala", **FAST, optimizer=optimizer, seed=1), [text], tmp_path / "seed")
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "seed"))

    store = prepare_features(tiny_target, [text])
    whole = len(Trainer(tiny_target, recipe, store, tmp_path)._batches(0))
    for killed_after in (1, whole, whole + 2):  # in the first epoch, at its end, in the second
        out = tmp_path / f"killed{killed_after}"
        steps = 0
        original = Trainer._train_step

        def dying(self, group, stop=False, original=original, limit=killed_after):
            nonlocal steps
            if steps == limit:
                raise KeyboardInterrupt
            steps += 1
            return original(self, group, stop)

        monkeypatch.setattr(Trainer, "_train_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_target, recipe, [text], out, checkpoint_minutes=0)
        monkeypatch.undo()
        monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "cache"))
        train(tiny_target, recipe, [text], out)
        assert same(weights(tmp_path / "one"), weights(out))
        assert steps_logged(out) == steps_logged(tmp_path / "one")


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
    assert not (tmp_path / "out" / "model.safetensors").exists()

    train(tiny_target, recipe, [text], tmp_path / "kept")
    with pytest.raises(UsageError, match=r"another training \(.*method.*differ\)"):
        train(tiny_target, recipe_for("hass", **FAST), [text], tmp_path / "kept")

    kept = weights(tmp_path / "kept")
    nan = next(iter(kept.values())).float().sum() * float("nan")
    monkeypatch.setattr(training, "step_loss", lambda *a: (nan.clone().requires_grad_(), torch.zeros(4)))
    with pytest.raises(DraftscopeError, match="loss is not a number"):
        train(tiny_target, recipe_for("eagle", **{**FAST, "epochs": 3}), [text], tmp_path / "nan")
    assert not (tmp_path / "nan" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("magic", {}, "unknown method 'magic': possible are eagle, hass,"),
        ("eagle", {"layers": 0}, "--layers is at least 1, not 0"),
        ("eagle", {"learning_rate": float("nan")}, "--learning-rate is a number above 0, not nan"),
        ("hass", {"top_weight": -1.0}, "--top-weight is 0 or a number above"),
        ("eagle", {"schedule": "steps"}, "unknown schedule 'steps'"),
        ("eagle", {"own_lm_head": True}, "--own-lm-head is for Medusa heads"),
        ("eagle", {"optimizer": "sgd"}, "unknown optimizer 'sgd': possible are adamw and muon"),
        ("medusa", {"align_steps": 3}, "--align-steps is for FeatureHeads"),
        ("medusa", {"feature_weight": 1.0}, "estimates no features"),
        ("medusa", {"soft_weight": 0.0}, "nothing would be learned"),
    ],
)
def test_recipes_that_make_no_sense(method: str, changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_for(method, **changes)


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
    total = next((tmp_path / "killed").rglob("done.bin")).stat().st_size
    assert calls - before == total - 2, "what was computed is not computed again"


def test_a_full_disk_while_caching_features_leaves_nothing(tiny_target, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path))

    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DraftscopeError, match="No space left on device"):
        prepare_features(tiny_target, [text])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_features_on_the_fly_train_the_same_head(tiny_target, text, tmp_path) -> None:
    recipe = recipe_for("eagle", **FAST)
    cached = train(tiny_target, recipe, [text], tmp_path / "cached")
    flying = train(tiny_target, recipe, [text], tmp_path / "fly", keep_features=False)
    assert flying.top1 == pytest.approx(cached.top1, abs=0.05)  # the cache is bfloat16


def test_a_budget_of_tokens_and_of_time(tiny_target, text, tmp_path) -> None:
    store = prepare_features(tiny_target, [text])
    epoch = Trainer(tiny_target, recipe_for("eagle", **{**FAST, "epochs": 1}), store, tmp_path)
    whole = sum(store.supervised(i) for i in epoch.used)
    train(tiny_target, recipe_for("eagle", **FAST, tokens=int(2.5 * whole)), [text], tmp_path / "tokens")
    seen = load_head(str(tmp_path / "tokens"), tiny_target).info.tokens_seen
    assert 2.5 * whole <= seen < 2.5 * whole + 300
    train(tiny_target, recipe_for("eagle", **FAST), [text], tmp_path / "time", max_minutes=0)
    assert steps_logged(tmp_path / "time") == [1]
    whole_run, rest = tmp_path / "whole", tmp_path / "time"
    for out in (whole_run, rest):
        train(tiny_target, recipe_for("eagle", **FAST), [text], out)
    assert same(weights(whole_run), weights(rest)), "what a time budget left is trained on"


def test_snapshots_are_heads_of_their_own(tiny_target, text, tmp_path) -> None:
    train(tiny_target, recipe_for("medusa", **FAST), [text], tmp_path, snapshots=3)
    seen = sorted(int(folder.name) for folder in tmp_path.iterdir() if folder.is_dir() and folder.name.isdecimal())
    assert len(seen) == 3
    for tokens in seen:
        assert load_head(str(tmp_path / str(tokens)), tiny_target).info.tokens_seen == tokens


def test_a_second_stage_starts_from_the_first(tiny_target, text, tmp_path) -> None:
    first = recipe_for("hass", **FAST, top_weight=0.0, draft_vocab=100)
    trained = train(tiny_target, first, [text], tmp_path / "first")
    second = recipe_for("hass", **FAST, start=str(tmp_path / "first"))
    trainer = Trainer(tiny_target, second, prepare_features(tiny_target, [text]), tmp_path / "second")
    trainer.begin()
    assert trainer.evaluate().top1 == pytest.approx(trained.top1, abs=0.02)  # heads are saved in bfloat16
    assert len(trainer.draft_vocab) == 100 and 0 < trainer.coverage["all"] <= 1, "the draft vocabulary is taken over"
    for changes, message in (({"layers": 2}, "another network"), ({"draft_vocab": 120}, "drafts from 100 tokens")):
        with pytest.raises(UsageError, match=message):
            train(tiny_target, recipe_for("hass", **{**FAST, **changes}, start=str(tmp_path / "first")), [text], tmp_path / "other")


@pytest.mark.parametrize("method", ["eagle", "koala-medusa"])
def test_a_second_stage_counts_on_and_tells_of_the_first(tiny_target, text, tmp_path, method) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    train(tiny_target, recipe_for(method, **FAST), [text], first, command="one")
    train(tiny_target, recipe_for(method, **FAST, start=str(first)), [text], second, command="two", max_minutes=0)
    train(tiny_target, recipe_for(method, **FAST, start=str(first)), [text], second, command="two")  # goes on from its checkpoint
    one, two = (json.loads((folder / "config.json").read_text())["draftscope"] for folder in (first, second))
    assert two["tokens_seen"] == 2 * one["tokens_seen"] and two["training"]["minutes"] >= one["training"]["minutes"]
    assert two["training"]["command"] == "one && two" and two["training"]["stage_before"] == one["training"]


def test_accumulated_batches_are_one_step(tiny_target, text, tmp_path) -> None:
    recipe = recipe_for("koala-eagle", **FAST, accumulate=3)
    trainer = Trainer(tiny_target, recipe, prepare_features(tiny_target, [text]), tmp_path)
    trainer.begin()
    batches = next(trainer._plan())[2]
    assert len(batches) == 3
    trainer._train_step(batches)
    summed = [parameter.grad.clone() for parameter in trainer.head.parameters()]
    norm = sum(float(gradient.square().sum()) for gradient in summed) ** 0.5
    assert norm == pytest.approx(recipe.clip_norm, rel=1e-3) or norm < recipe.clip_norm


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are started as accelerate does on POSIX")
def test_two_processes_equal_two_accumulated_batches(tiny_target, text, tmp_path) -> None:
    command = [
        "--method",
        "koala-eagle",
        "--target",
        str(GOLDEN / "tiny_base"),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--data",
        str(text),
    ]
    command += ["--batch-tokens", "256", "--epochs", "1", "--learning-rate", "3e-3", "--device", "cpu"]
    # what `accelerate launch` starts where there are several GPUs
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m", "heads", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(GOLDEN.parent.parent)}
    done = subprocess.run([*launch, *command, "--out", str(tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("held-out") == 1
    single = [sys.executable, "-m", "heads", "train", *command, "--accumulate", "2", "--out", str(tmp_path / "one")]
    assert subprocess.run(single, env=environment, capture_output=True, timeout=300).returncode == 0
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
