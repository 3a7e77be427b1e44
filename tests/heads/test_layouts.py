"""Every released layout, written here tensor by tensor as the public files have it, on targets of each kind: decoded losslessly."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from decoding import Settings, Target, UsageError, generate, load_target
from heads import load_head, load_heads

VOCAB, HIDDEN, INNER, HEADS, KV = 17, 32, 48, 4, 2
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
}  # Qwen3's heads are not hidden / heads wide
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target of each kind, random weights."""
    out = {}
    for kind, more in KINDS.items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(
            kind, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=KV, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=None, **more,
        )  # fmt: skip
        out[kind] = tmp_path_factory.mktemp("targets") / kind
        AutoModelForCausalLM.from_config(config).save_pretrained(out[kind])
    return out


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.2


def eagle_tensors(layers: int = 1, bias: bool = True, qkv_bias: bool = False, kv: int = KV) -> dict[str, torch.Tensor]:
    """The tensors of EAGLE-1/2 and HASS releases (embedding first in fc; no input norm in layer 0, no final norm)."""
    torch.manual_seed(5)
    wide = HIDDEN * kv // HEADS
    out = {"embed_tokens.weight": random(VOCAB, HIDDEN), "fc.weight": random(HIDDEN, 2 * HIDDEN)}
    if bias:
        out["fc.bias"] = random(HIDDEN)
    for layer in range(layers):
        name = f"layers.{layer}."
        for part, rows in (("q", HIDDEN), ("k", wide), ("v", wide)):
            out[f"{name}self_attn.{part}_proj.weight"] = random(rows, HIDDEN)
            if qkv_bias:
                out[f"{name}self_attn.{part}_proj.bias"] = random(rows)
        out[f"{name}self_attn.o_proj.weight"] = random(HIDDEN, HIDDEN)
        out[f"{name}mlp.gate_proj.weight"], out[f"{name}mlp.up_proj.weight"] = random(INNER, HIDDEN), random(INNER, HIDDEN)
        out[f"{name}mlp.down_proj.weight"] = random(HIDDEN, INNER)
        out[f"{name}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        if layer:
            out[f"{name}input_layernorm.weight"] = torch.ones(HIDDEN)
    return out


def eagle_config(**more) -> dict:
    """As the public config.json files, without a "bias" key unless one is given."""
    own = {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": HIDDEN,
        "initializer_range": 0.02, "intermediate_size": INNER, "max_position_embeddings": 2048, "model_type": "llama",
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 1, "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.28.1", "use_cache": True, "vocab_size": VOCAB,
    }  # fmt: skip
    return {name: value for name, value in {**own, **more}.items() if value != "absent"}


def write(folder: Path, config: dict | None, tensors: dict[str, torch.Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, folder / file) if file.endswith(".safetensors") else torch.save(half, folder / file)
    return folder


def medusa_tensors(prefix: str, positions: int = 3, layers: int = 1, own_lm_head: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 if own_lm_head else 14)  # seeds whose guesses are right at times
    out = {}
    for position in range(positions):
        for layer in range(layers):
            out[f"{prefix}{position}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN)
            out[f"{prefix}{position}.{layer}.linear.bias"] = random(HIDDEN)
        if own_lm_head:
            out[f"{prefix}{position}.{layers}.weight"] = random(VOCAB, HIDDEN)
    return out


def of_medusa_v1(folder: Path, target: Path, file: str = "medusa_lm_head.pt", **how) -> Path:
    # the released configs say 2 heads where the file has 5
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    return write(folder, config, medusa_tensors("", **how), file)


def of_medusa_v2(folder: Path, target: Path, pickled: bool = False) -> Path:
    """Heads inside the target's checkpoint, cut into two files with an index."""
    config = json.loads((target / "config.json").read_text()) | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    whole = {**load_file(target / "model.safetensors"), **medusa_tensors("medusa_head.")}
    base, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    names, where = sorted(whole), {}
    folder.mkdir(exist_ok=True)
    for part, share in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{base}-{part:05}-of-00002.{ending}"
        tensors = {name: whole[name].float() for name in share}
        torch.save(tensors, folder / file) if pickled else save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(share, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in whole.values())}, "weight_map": where}
    (folder / f"{base}.{ending}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BIN, SAFE = "pytorch_model.bin", "model.safetensors"
LAYOUTS = {
    "llama2: no bias key, fc.bias in the file": lambda f, t: write(f, eagle_config(), eagle_tensors(), BIN),
    "llama3: bias false": lambda f, t: write(f, eagle_config(bias=False, rope_theta=500000.0), eagle_tensors(bias=False), SAFE),
    "hass llama3: bias false, but fc.bias is there": lambda f, t: write(f, eagle_config(bias=False), eagle_tensors(), BIN),
    "qwen2: qkv_bias": lambda f, t: write(f, eagle_config(qkv_bias=True, bias=False), eagle_tensors(bias=False, qkv_bias=True), SAFE),
    "vicuna: no num_key_value_heads": lambda f, t: write(f, eagle_config(num_key_value_heads="absent"), eagle_tensors(kv=HEADS), BIN),
    "vicuna 33b: max_sequence_length": lambda f, t: write(
        f, eagle_config(max_position_embeddings="absent", max_sequence_length=2048), eagle_tensors(), BIN
    ),
    "mixtral: another model_type": lambda f, t: write(f, eagle_config(model_type="mixtral", num_local_experts=8), eagle_tensors(), SAFE),
    "legacy rope scaling": lambda f, t: write(f, eagle_config(rope_scaling={"type": "linear", "factor": 2.0}), eagle_tensors(), BIN),
    "llama 3.1 rope scaling": lambda f, t: write(f, eagle_config(rope_scaling=LLAMA31), eagle_tensors(), SAFE),
    "two layers": lambda f, t: write(f, eagle_config(num_hidden_layers=2), eagle_tensors(layers=2), SAFE),
    "medusa v1": of_medusa_v1,
    "medusa v1 without lm_heads": lambda f, t: of_medusa_v1(f, t, own_lm_head=False),
    "medusa v1 as safetensors": lambda f, t: of_medusa_v1(f, t, "medusa_lm_head.safetensors", layers=2),
    "medusa v2": of_medusa_v2,
    "medusa v2 as pickles": lambda f, t: of_medusa_v2(f, t, pickled=True),
}


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, targets: dict[str, Path]) -> Target:
    return load_target(str(targets[request.param]), device="cpu", dtype="float32")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_released_layout_decodes_losslessly(layout: str, target: Target, targets: dict[str, Path], tmp_path: Path) -> None:
    folder = LAYOUTS[layout](tmp_path / "head", targets[target.name])
    head = load_head(str(folder), target)
    assert head.info.method == ("medusa" if "medusa" in layout else "eagle")
    # a tree so wide that even random guesses are right at times (of a feature head: all pairs of tokens)
    depth, top_k, nodes = (3, 10, 63) if "medusa" in layout else (2, 17, 306)
    settings = Settings(max_new_tokens=40, tree_depth=depth, tree_top_k=top_k, tree_nodes=nodes)
    run = generate(target, head, PROMPT, settings)
    assert run.output_ids == generate(target, None, PROMPT, settings).output_ids
    assert len(run.output_ids) == 40 and any(step.accepted for step in run.steps)


@pytest.mark.parametrize("pickled", [False, True])
def test_medusa_v2_is_its_own_target(pickled: bool, targets: dict[str, Path], tmp_path: Path) -> None:
    folder = of_medusa_v2(tmp_path / "both", targets["mistral"], pickled)
    both = load_target(str(folder), device="cpu", dtype="float32")
    plain = generate(load_target(str(targets["mistral"]), device="cpu", dtype="float32"), None, PROMPT, Settings(max_new_tokens=24))
    assert generate(both, load_head(str(folder), both), PROMPT, Settings(max_new_tokens=24)).output_ids == plain.output_ids


def test_heads_of_one_name_are_told_apart(targets: dict[str, Path], tmp_path: Path) -> None:
    target = load_target(str(targets["mistral"]), device="cpu", dtype="float32")
    folders = [str(of_medusa_v1(tmp_path / place / "head", targets["mistral"])) for place in ("a", "b")]
    other = str(of_medusa_v1(tmp_path / "other", targets["mistral"]))
    assert [head.name for head in load_heads([*folders, other], target)] == [*folders, "other"]
    with pytest.raises(UsageError, match="given twice"):
        load_heads([other, other], target)


def test_safetensors_are_preferred(targets: dict[str, Path], tmp_path: Path) -> None:
    target = load_target(str(targets["llama"]), device="cpu", dtype="float32")
    folder = write(tmp_path / "head", eagle_config(), eagle_tensors(), SAFE)
    (folder / BIN).write_bytes(b"this is never read")
    load_head(str(folder), target)
    folder = of_medusa_v1(tmp_path / "medusa", targets["llama"], "medusa_lm_head.safetensors")
    (folder / "medusa_lm_head.pt").write_bytes(b"this is never read")
    load_head(str(folder), target)


def eagle3_tensors() -> dict[str, torch.Tensor]:
    names = {"fc.weight": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
             "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (9, HIDDEN)}  # fmt: skip
    return {**{name: random(*shape) for name, shape in names.items()}, "d2t": torch.arange(9).float(), "t2d": torch.ones(VOCAB)}


class Evil:
    """Code in a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def evil(folder: Path, file: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config()))
    (folder / file).write_bytes(pickle.dumps({"fc.weight": Evil(folder / "was-here")}, protocol=2))
    return folder


def evil_in_a_zip(folder: Path) -> Path:
    """Code in the form that torch writes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle_config()))
    torch.save({"fc.weight": Evil(folder / "was-here")}, folder / BIN)
    return folder


def cut(folder: Path, file: str, size: int) -> Path:
    path = folder / file
    path.write_bytes(path.read_bytes()[:size])
    return folder


REFUSED = {
    "eagle-3, by its tensors": (lambda f: write(f, eagle_config(), eagle3_tensors(), SAFE), "is an EAGLE-3 head"),
    "eagle-3, pickled": (lambda f: write(f, eagle_config(), eagle3_tensors(), BIN), "is an EAGLE-3 head"),
    "eagle-3, by its config": (
        lambda f: write(f, eagle_config(architectures=["LlamaForCausalLMEagle3"]), eagle_tensors(), SAFE), "is an EAGLE-3 head",
    ),
    "a whole model": (
        lambda f: write(f, eagle_config(), {"model.layers.0.mlp.up_proj.weight": random(3, 3)}, SAFE), "is a whole language model",
    ),
    "something else": (lambda f: write(f, eagle_config(), {"a": random(2), "b": random(2)}, SAFE), "no layout that is known here: .* a, b"),
    "fc.bias missing": (lambda f: write(f, eagle_config(), eagle_tensors(bias=False), BIN), r"fc.bias is missing, expected \(32,\)"),
    "qkv biases missing": (
        lambda f: write(f, eagle_config(qkv_bias=True), eagle_tensors(), SAFE), r"k_proj.bias is missing.*q_proj.bias is missing.*v_proj",
    ),
    "all at once": (
        lambda f: write(f, eagle_config(), {**eagle_tensors(), "fc.weight": random(3, 4), "x.y": random(2), "fc.bias": random(9)}, SAFE),
        r"fc.bias is \(9,\), expected \(32,\); fc.weight is \(3, 4\), expected \(32, 64\); x.y \(2,\) is not part",
    ),
    "another embedding": (
        lambda f: write(f, eagle_config(), {**eagle_tensors(), "embed_tokens.weight": random(VOCAB + 1, HIDDEN)}, SAFE),
        r"embed_tokens.weight is \(18, 32\), expected \(17, 32\)",
    ),
    "hidden size and vocabulary of another target": (
        lambda f: write(f, eagle_config(hidden_size=16, vocab_size=9, head_dim=8, intermediate_size=INNER), narrow_tensors(), SAFE),
        "hidden size is 16, the target's 32; its vocabulary has 9 tokens, the target's 17",
    ),
    "medusa of another target": (
        lambda f: write(f, {"medusa_num_heads": 1}, {"0.0.linear.weight": random(8, 8), "0.0.linear.bias": random(8)}, "medusa_lm_head.pt"),
        "hidden size is 8, the target's 32",
    ),
    "medusa with a wrong lm_head": (
        lambda f: write(f, {}, {**medusa_tensors(""), "1.1.weight": random(VOCAB, 3)}, "medusa_lm_head.pt"),
        r"medusa_head.1.1.weight is \(17, 3\), expected \(17, 32\)",
    ),
    "medusa with a part missing": (
        lambda f: write(f, {}, {k: v for k, v in medusa_tensors("").items() if k != "2.0.linear.bias"}, "medusa_lm_head.pt"),
        r"medusa_head.2.0.linear.bias is missing, expected \(32,\)",
    ),
    "safetensors cut short": (lambda f: cut(write(f, eagle_config(), eagle_tensors(), SAFE), SAFE, 4000), "broken or not a weights file"),
    "safetensors cut in the header": (lambda f: cut(write(f, eagle_config(), eagle_tensors(), SAFE), SAFE, 100), "broken or not a weights"),
    "pickle cut short": (lambda f: cut(write(f, eagle_config(), eagle_tensors(), BIN), BIN, 4000), "broken or not a weights file"),
    "medusa cut short": (lambda f: cut(of_medusa_v1(f, f), "medusa_lm_head.pt", 3000), "broken or not a weights file"),
    "code in a pickle": (lambda f: evil(f, BIN), "holds code or objects other than tensors"),
    "code in a zipped pickle": (evil_in_a_zip, "holds code or objects other than tensors"),
    "code in a medusa pickle": (lambda f: evil(f, "medusa_lm_head.pt"), "holds code or objects other than tensors"),
}  # fmt: skip


def narrow_tensors() -> dict[str, torch.Tensor]:
    """A head for features of 16 and 9 tokens."""
    shapes = {"embed_tokens.weight": (9, 16), "fc.weight": (16, 32), "fc.bias": (16,), "layers.0.self_attn.q_proj.weight": (32, 16),
              "layers.0.self_attn.k_proj.weight": (16, 16), "layers.0.self_attn.v_proj.weight": (16, 16),
              "layers.0.self_attn.o_proj.weight": (16, 32), "layers.0.mlp.gate_proj.weight": (INNER, 16),
              "layers.0.mlp.up_proj.weight": (INNER, 16), "layers.0.mlp.down_proj.weight": (16, INNER),
              "layers.0.post_attention_layernorm.weight": (16,)}  # fmt: skip
    return {name: random(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_words(case: str, targets: dict[str, Path], tmp_path: Path) -> None:
    make, message = REFUSED[case]
    target = load_target(str(targets["llama"]), device="cpu", dtype="float32")
    folder = make(tmp_path / "head")
    with pytest.raises(UsageError, match=message) as refusal:
        load_head(str(folder), target)
    assert not (folder / "was-here").exists() and "\n" not in str(refusal.value)
