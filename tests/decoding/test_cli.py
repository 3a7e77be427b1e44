"""The command lines: results where they are asked for, and one clear line with the right exit code for what is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding import Run, bench
from decoding.cli import main
from decoding.errors import DraftscopeError
from decoding.written import check_place, save
from heads.cli import main as heads_main
from tests.app.tiny import tiny_head, tiny_target
from tests.records import make_run

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target(folder / "tiny")
    heads = {
        name: tiny_head(f"hass_tiny/{source}", folder / name, name, "tiny")
        for name, source in (("hass", "head_mid"), ("eagle", "head_weak"))
    }
    prompts = folder / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "test", "turns": [text]} for i, text in enumerate(("the little world", "now you see", "how good"))]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return {"target": str(target), "prompts": str(prompts), **{name: str(path) for name, path in heads.items()}}


def run(models: dict[str, str], *extra: str) -> list[str]:
    return ["run", "--target", models["target"], "--device", "cpu", "--dtype", "float32", *extra]


def test_run_prints_the_answer_and_writes_the_record(models, tmp_path, capsys) -> None:
    trace = tmp_path / "run.json"
    code = main(run(models, "--head", models["hass"], "--prompt", "the world", "--max-new-tokens", "20", "--trace", str(trace)))
    out = capsys.readouterr()
    record = Run.load(trace)
    assert code == 0 and out.out.strip() == record.text.strip()
    assert record.head == "hass" and len(record.output_ids) == 20
    assert "tau" in out.err and "tokens/s" in out.err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "the " * 1100], "the context of tiny holds 1024"),
        (["--prompt", "the", "--head", "nope"], "unknown head 'nope'"),
        (["--prompt", "the", "--head", "HASS", "--tree-nodes", "900"], "setting tree_nodes: Input should be less than"),
        (
            ["--prompt", "the", "--head", "HASS", "--tree-nodes", "200", "--tree-top-k", "2"],
            "tree_nodes 200 is more than the 22 candidates",
        ),
        (["--prompt", "the", "--temperature", "-1"], "setting temperature"),
        (["--prompt", "the", "--temperature", "nan"], "setting temperature"),
        (["--prompt", "the", "--dtype", "int3"], "unknown dtype 'int3': possible are auto, float32, bfloat16, float16"),
        (["--prompt", "the", "--device", "abacus"], "unknown device 'abacus'"),
        (["--prompt", "the", "--device", "cuda"], "torch sees no GPU here"),
        (["--prompt", "the", "--target", "nowhere"], "unknown target 'nowhere'"),
        (["--prompt", "the", "--threads", "0"], "--threads is at least 1"),
        (["--prompt", "the", "--trace", "/tmp"], "/tmp is a folder: name the file to be written"),
        (["--prompt", "the", "--trace", "/dev/null/run.json"], "is below something that is not a folder"),
        (["--prompt", "the", "--trace", "/proc/no/run.json"], "/proc/no/run.json can't be written: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(models, capsys, extra, message) -> None:
    extra = [models["hass"] if word == "HASS" else word for word in extra]
    assert main(run(models, *extra)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and error[-1].startswith("error: ")
    assert not any("Traceback" in line for line in error)


def test_a_head_of_another_target_is_refused(models, tmp_path, capsys) -> None:
    config = json.loads((Path(models["target"]) / "config.json").read_text())
    head = tiny_head("hass_tiny/head_mid", tmp_path / "head", "hass", "tiny")
    changed = {**json.loads((head / "config.json").read_text()), "vocab_size": 300}
    (head / "config.json").write_text(json.dumps(changed))
    tensors = load_file(head / "model.safetensors")
    embedding = torch.nn.functional.pad(tensors["embed_tokens.weight"], (0, 0, 0, 300 - 257))
    save_file({**tensors, "embed_tokens.weight": embedding}, head / "model.safetensors")
    assert config["vocab_size"] == 257
    assert main(run(models, "--prompt", "the", "--head", str(head))) == 2
    assert "its vocabulary has 300 tokens, the target's 257" in capsys.readouterr().err


def test_bench_measures_every_method_on_the_same_prompts(models, tmp_path, capsys) -> None:
    out = tmp_path / "results.json"
    arguments = ["bench", "--target", models["target"], "--device", "cpu", "--dtype", "float32", "--prompts", models["prompts"]]
    arguments += ["--head", models["hass"], "--head", models["eagle"], "--limit", "2", "--repeats", "2", "--peers"]
    assert main([*arguments, "--max-new-tokens", "24", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert list(results["methods"]) == ["autoregressive", "hass", "eagle", "transformers", "transformers, prompt lookup"]
    assert results["prompts"] == {"prompts": 2} and results["repeats"] == 2
    plain, hass = results["methods"]["autoregressive"], results["methods"]["hass"]
    assert plain["speed_up"]["ratio"] == 1 and plain["mean_acceptance_length"] == 1
    assert hass["lossless"] == {"equal": 2, "of": 2, "divergences": []}
    assert hass["mean_acceptance_length"] > 1.5 and len(hass["acceptance_by_depth"]) == 6
    assert hass["tokens"] == plain["tokens"] == 2 * 2 * 23
    assert hass["speed_up"]["low"] <= hass["speed_up"]["ratio"] <= hass["speed_up"]["high"]
    assert "transformers" in hass["speed_up_over"]
    assert psutil.Process().memory_info().rss / 2**20 * 0.5 < results["peak_memory_mib"] < 30_000
    printed = capsys.readouterr().out
    assert "hass" in printed and "bonus included" in printed


def test_prompts_are_told_apart_where_two_files_use_the_same_ids(models, tmp_path, capsys) -> None:
    (tmp_path / "more").mkdir()
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "more" / "a.jsonl"]
    for path, text in zip(files, ("the little world", "now you see how good", "the"), strict=True):
        path.write_text(json.dumps({"id": 1, "category": "test", "turns": [text]}))
    common = ["bench", "--target", models["target"], "--device", "cpu", "--dtype", "float32", "--head", models["hass"]]
    out = tmp_path / "results.json"
    assert main([*common, "--max-new-tokens", "16", "--out", str(out), "--prompts", *map(str, files[:2])]) == 0
    hass = json.loads(out.read_text())["methods"]["hass"]
    assert hass["lossless"] == {"equal": 2, "of": 2, "divergences": []}  # each beside plain decoding of its own prompt
    assert hass["speed_up"]["low"] < hass["speed_up"]["high"]  # two prompts were drawn from, not one
    assert main([*common, "--prompts", str(files[0]), str(files[2])]) == 2
    assert "two prompt files are called a" in capsys.readouterr().err


def test_peak_memory_is_known_on_windows_too(monkeypatch) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=3 << 20))
    monkeypatch.setattr(bench, "resource", None)
    monkeypatch.setattr(bench, "psutil", SimpleNamespace(Process=lambda: process))
    assert bench._peak_memory(SimpleNamespace(device=torch.device("cpu"))) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read"),
        ("", "is empty"),
        ("{}\n", "line 1 is not a prompt"),
        ('{"id": 1}\n', "it has no 'turns'"),
        ("[1]\n", "line 1 is not a prompt"),
        ('{"id": 1, "turns": []}\n', "line 1 is not a prompt"),
    ],
)
def test_bad_prompt_files(models, tmp_path, capsys, text, message) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "--target", models["target"], "--prompts", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "program", "option"),
    [(main, "bench", "--limit"), (main, "bench", "--repeats"), (main, "tune", "--limit"), (heads_main, "evaluate", "--limit")],
)
def test_a_measurement_of_nothing_is_refused(models, capsys, command, program, option) -> None:
    with pytest.raises(SystemExit) as stopped:
        command([program, "--head", models["hass"], "--prompts", models["prompts"], option, "0"])
    assert stopped.value.code == 2 and "'0' is not a number from 1 up" in capsys.readouterr().err


def test_a_place_is_checked_without_leaving_anything_there(tmp_path) -> None:
    check_place(tmp_path / "new" / "folder" / "result.json")
    assert not list(tmp_path.iterdir())


def test_a_result_that_the_disk_has_no_room_for_is_one_line(monkeypatch, tmp_path) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("decoding.written.os.replace", full)
    with pytest.raises(DraftscopeError, match=r"can't be written to .*: No space left on device"):
        save({}, tmp_path / "result.json")


def test_others_may_read_a_result_but_not_a_record(tmp_path) -> None:
    save({}, tmp_path / "result.json")
    make_run([[21, 22]]).save(tmp_path / "run.json")
    assert {path.name: path.stat().st_mode & 0o044 for path in tmp_path.iterdir()} == {"result.json": 0o044, "run.json": 0}


def test_results_that_can_not_be_written_are_refused_before_the_work(models, tmp_path, capsys) -> None:
    common = ["--target", models["target"], "--head", models["hass"], "--prompts", models["prompts"], "--out", str(tmp_path)]
    for command in (main, ["bench", *common]), (heads_main, ["evaluate", *common]):
        assert command[0](command[1]) == 2
        assert f"{tmp_path} is a folder" in capsys.readouterr().err
    assert not list(tmp_path.parent.glob("*.part"))


def test_evaluate_tells_acceptance_agreement_and_overlap(models, tmp_path, capsys) -> None:
    out = tmp_path / "evaluation.json"
    arguments = ["evaluate", "--target", models["target"], "--device", "cpu", "--dtype", "float32", "--prompts", models["prompts"]]
    assert heads_main([*arguments, "--head", models["hass"], "--head", models["eagle"], "--max-new-tokens", "30", "--out", str(out)]) == 0
    heads = json.loads(out.read_text())["heads"]
    assert heads["hass"]["mean_acceptance_length"] > heads["eagle"]["mean_acceptance_length"]
    for entry in heads.values():
        assert 0 < entry["top1_agreement"] <= entry["top4_agreement"] <= 1
        assert all(0 < value <= 1.0001 for value in entry["overlap_by_depth"])
    over = heads["eagle"]["tau_over"]["hass"]
    assert heads["hass"]["tau_over"] == {} and over["low"] <= over["ratio"] <= over["high"]
    assert over["ratio"] == pytest.approx(heads["eagle"]["mean_acceptance_length"] / heads["hass"]["mean_acceptance_length"])
    printed = capsys.readouterr().out
    assert "tau by set" in printed and f"tau is {over['ratio']:.2f} [" in printed


def test_train_and_synthesize_refuse_bad_input(models, tmp_path, capsys) -> None:
    common = ["--target", models["target"], "--device", "cpu", "--out", str(tmp_path / "out")]
    assert heads_main(["train", "--method", "magic", "--data", str(tmp_path), *common]) == 2
    assert "unknown method 'magic': possible are eagle, hass" in capsys.readouterr().err
    assert heads_main(["train", "--method", "hass", "--data", str(tmp_path), *common]) == 2
    assert "holds no training text" in capsys.readouterr().err
    assert heads_main(["synthesize", "--tokens", "0", *common]) == 2
    assert "--tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [["-m", "decoding"], ["-m", "decoding", "run"], ["-m", "heads", "train"], ["-m", "decoding", "dance"]]
)
def test_wrong_arguments_exit_with_2_and_no_traceback(arguments) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["decoding", "heads"])
def test_help(module) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage:" in done.stdout
