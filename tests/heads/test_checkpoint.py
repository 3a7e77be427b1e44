"""Head folders: released layouts load as they are, what does not fit is named."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding import Settings, UsageError, generate
from decoding.records import TreeShape
from heads import catalogue, load_head
from heads.checkpoint import HeadMeta, load_feature_head, save_feature_head
from heads.feature import FeatureHead

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a released-style head to spoil."""
    shutil.copytree(GOLDEN / "hass_tiny" / "head_mid", tmp_path / "head")
    (tmp_path / "head" / "pytorch_model.bin").unlink()
    return tmp_path / "head"


def change_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def change_tensors(folder: Path, **values) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **values}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def nodes(folder: Path, target) -> list[list[int]]:
    return [step.node_ids for step in generate(target, load_head(str(folder), target), PROMPT, Settings(max_new_tokens=12)).steps]


def test_safetensors_and_pickle_are_the_same_head(tiny_target, folder) -> None:
    pickled = folder.parent / "pickled"
    shutil.copytree(GOLDEN / "hass_tiny" / "head_mid", pickled)
    (pickled / "model.safetensors").unlink()
    assert nodes(folder, tiny_target) == nodes(pickled, tiny_target)


@pytest.mark.parametrize("bias", [None, True, False])
def test_the_file_decides_about_the_bias(tiny_target, folder, bias) -> None:
    wanted = nodes(folder, tiny_target)
    change_config(folder, bias=bias)
    assert nodes(folder, tiny_target) == wanted


def test_legacy_rope_settings(tiny_target, folder) -> None:
    wanted = nodes(folder, tiny_target)
    change_config(folder, rope_theta=None)
    assert nodes(folder, tiny_target) == wanted, "absent means 10000"
    change_config(folder, rope_scaling={"type": "linear", "factor": 2.0})
    assert nodes(folder, tiny_target) != wanted


def test_query_biases_are_loaded(tiny_target, folder) -> None:
    biases = {f"layers.0.self_attn.{n}_proj.bias": torch.ones(w) for n, w in (("q", 64), ("k", 32), ("v", 32))}
    change_tensors(folder, **biases)
    module, _, _ = load_feature_head(folder)
    assert module.shape.qkv_bias and module.layers[0].self_attn["q_proj"].bias.sum() == 64


def test_two_layers_round_trip(tiny_target, tmp_path) -> None:
    module, _, _ = load_feature_head(GOLDEN / "hass_tiny" / "head_mid")
    config = module.shape.llama.__class__.from_dict({**module.shape.llama.to_dict(), "num_hidden_layers": 2})
    two = FeatureHead(module.shape.__class__(config, fc_bias=False))
    meta = HeadMeta("koala-eagle", "tiny_base", align_steps=2, tokens_seen=77, tree=TreeShape(3, 4, 12), training={"seed": 1})
    vocab = torch.tensor([3, 9, 200, 250, 256])
    save_feature_head(tmp_path / "two", two, meta, vocab, dtype=torch.float32)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["config.json", "model.safetensors"]
    again, found, found_vocab = load_feature_head(tmp_path / "two")
    assert found == meta and torch.equal(found_vocab, vocab)
    assert all(torch.equal(a, b) for a, b in zip(two.state_dict().values(), again.state_dict().values(), strict=True))
    head = load_head(str(tmp_path / "two"), tiny_target)
    assert head.tree == TreeShape(3, 4, 12) and head.info.layers == 2 and head.info.draft_vocab_size == 5


def test_files_of_a_shipped_head_stay_small(tiny_target, tmp_path, monkeypatch) -> None:
    module, meta, _ = load_feature_head(GOLDEN / "hass_tiny" / "head_mid")
    save_feature_head(tmp_path / "head", module, meta, dtype=torch.float32)
    assert (tmp_path / "head" / "model.safetensors").is_file()
    monkeypatch.setattr("heads.checkpoint.SMALL_SHARD", 40_000)
    save_feature_head(tmp_path / "head", module, meta, dtype=torch.float32)
    names = sorted(path.name for path in (tmp_path / "head").iterdir())
    assert "model.safetensors" not in names and "model.safetensors.index.json" in names and len(names) > 3
    again, _, _ = load_feature_head(tmp_path / "head")
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True))
    next((tmp_path / "head").glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match=r"not complete: model-00002-of-\d+.safetensors is missing"):
        load_head(str(tmp_path / "head"), tiny_target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: change_tensors(f, **{"fc.weight": torch.zeros(64, 100)}), r"fc.weight is \(64, 100\), expected \(64, 128\)"),
        (lambda f: change_tensors(f, **{"layers.0.mlp.up_proj.weight": None}), "layers.0.mlp.up_proj.weight is missing"),
        (lambda f: change_tensors(f, **{"extra.x": torch.zeros(2)}), r"extra.x \(2,\) is not part of such a head"),
        (lambda f: change_config(f, num_hidden_layers=2), "layers.1.input_layernorm.weight is missing"),
        (lambda f: change_config(f, vocab_size=300), r"embed_tokens.weight is \(257, 64\), expected \(300, 64\)"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "broken or not a weights file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "broken or not a weights file"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors or"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "can't be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no settings"),
    ],
)
def test_what_does_not_fit_is_named(tiny_target, folder, change, message) -> None:
    change(folder)
    with pytest.raises(UsageError, match=message):
        load_head(str(folder), tiny_target)


def test_a_wrong_hidden_size_is_named(tiny_target, folder) -> None:
    module, _, _ = load_feature_head(folder)
    config = module.shape.llama.__class__.from_dict({**module.shape.llama.to_dict(), "hidden_size": 32, "head_dim": 16})
    save_feature_head(folder.parent / "narrow", FeatureHead(module.shape.__class__(config)), HeadMeta("eagle", "tiny_base"))
    with pytest.raises(UsageError, match="its hidden size is 32, the target's 64"):
        load_head(str(folder.parent / "narrow"), tiny_target)


def test_several_faults_are_told_at_once(tiny_target, folder) -> None:
    change_tensors(folder, **{"layers.0.mlp.up_proj.weight": None, "fc.weight": torch.zeros(64, 100)})
    with pytest.raises(UsageError, match=r"fc.weight is .*; .*up_proj.weight is missing"):
        load_head(str(folder), tiny_target)


def test_a_pickle_with_code_in_it_is_refused(tiny_target, folder) -> None:
    class Evil:
        def __reduce__(self):
            return (open, (str(folder / "was-here"), "w"))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(UsageError, match="broken or not a weights file"):
        load_head(str(folder), tiny_target)
    assert not (folder / "was-here").exists()


@pytest.mark.parametrize("name", ["nope", "./nope", "/nope/nope", "a/b/c"])
def test_an_unknown_head_lists_what_there_is(tiny_target, name) -> None:
    with pytest.raises(UsageError, match=f"unknown head '{name}'"):
        load_head(name, tiny_target)


def test_every_shipped_head_loads(embedded_float32) -> None:
    for name in catalogue(embedded_float32.name):
        head = load_head(name, embedded_float32)
        assert head.name == name and head.info.method == name
        assert all(file.stat().st_size < 10_000_000 for file in catalogue()[name].iterdir())
