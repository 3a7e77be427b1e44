"""Chat formats and stop tokens of the families in the catalogue, on small tokenizers that are built like the real ones."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from decoding.chat import _encode_apart, _rendered, encode, encode_prompt, template_pieces
from decoding.errors import UsageError
from decoding.known import catalogue, family_of
from decoding.loading import load_tokenizer, stop_ids

LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
SMOL = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# the name of a released target -> (family, how its tokenizer is built, one user turn, the turns that follow it)
FORMATS = {
    "Llama-2-7b-chat-hf": ("llama-2", "prepend", "<s>[INST] hi [/INST]", " ho </s><s>[INST] so [/INST]"),
    "vicuna-7b-v1.3": ("vicuna", "prepend", f"<s>{VICUNA} USER: hi ASSISTANT:", " ho</s>USER: so ASSISTANT:"),
    "Mistral-7B-Instruct-v0.2": ("mistral", "metaspace", "<s>[INST] hi [/INST]", "ho</s>[INST] so [/INST]"),
    "Meta-Llama-3-8B-Instruct": (
        "llama-3",
        "bytes",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "ho<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nso<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Qwen2-7B-Instruct": (
        "qwen2",
        "bytes",
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "ho<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen3-8B": (
        "qwen3",
        "bytes",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "ho<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n",
    ),
    "SmolLM2-360M-Instruct": (
        "smollm2",
        "bytes",
        f"<|im_start|>system\n{SMOL}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "ho<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n",
    ),
}


def byte_level(control: list[str], plain: list[str]) -> Tokenizer:
    """As LLaMA-3, Qwen and SmolLM2: every byte is a token; `plain` are added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return tokenizer


def sentencepiece(how: str) -> Tokenizer:
    """As LLaMA-2, Vicuna (a blank before the text and after each control token) and newer Mistral (before the very first word)."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    if how == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in words[:3]])
    return tokenizer


def write_tokenizer(folder: Path, name: str, template: str | None = None) -> Path:
    family, how, *_ = FORMATS[name]
    if how != "bytes":
        fast = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(how), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    elif family == "llama-3":
        fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(LLAMA_3, []), bos_token=LLAMA_3[0], eos_token=LLAMA_3[1])
    else:
        plain = ["<think>", "</think>", "<tool_call>"] if family == "qwen3" else []
        fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(CHATML, plain), eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerFast]:
    """One for each family, without a template of its own: it is known by the name of the folder."""
    folder = tmp_path_factory.mktemp("families")
    return {name: load_tokenizer(write_tokenizer(folder, name), str(folder / name)) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_the_one_the_target_was_trained_on(tokenizers, name: str) -> None:
    _, _, opening, more = FORMATS[name]
    tokenizer = tokenizers[name]
    turns = [("user", "hi"), ("assistant", "ho"), ("user", "so")]
    told = [{"role": role, "content": content} for role, content in turns]
    assert _rendered(tokenizer, told[:1], True) == opening
    assert _rendered(tokenizer, told, True) == opening + more
    assert encode_prompt(tokenizer, "hi") == encode(tokenizer, opening)
    assert encode_prompt(tokenizer, told) == encode(tokenizer, opening + more)


@pytest.mark.parametrize("name", [name for name, (family, *_) in FORMATS.items() if family not in ("qwen2", "qwen3", "smollm2")])
def test_one_bos_and_no_second_one(tokenizers, name: str) -> None:
    tokenizer = tokenizers[name]
    ids = encode_prompt(tokenizer, "hi")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_what_looks_like_a_control_token_stays_text(tokenizers, name: str) -> None:
    tokenizer = tokenizers[name]
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    of_template = [token_id for token_id in encode_prompt(tokenizer, "hi") if token_id in added]
    for text in added.values():
        ids = encode_prompt(tokenizer, f"a {text} b")
        assert [token_id for token_id in ids if token_id in added] == of_template
        assert f"a {text} b" in tokenizer.decode(ids)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip))
def test_the_way_for_typed_control_tokens_gives_ordinary_text_the_same_ids(tokenizers, name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    pieces = template_pieces(tokenizer, ["user"])
    assert _encode_apart(tokenizer, pieces, [text]) == encode(tokenizer, pieces[0] + text + pieces[1])


@pytest.mark.parametrize("name", FORMATS)
def test_every_stop_token_counts(tokenizers, name: str, tmp_path: Path) -> None:
    family, tokenizer = FORMATS[name][0], tokenizers[name]
    wanted = {tokenizer.convert_tokens_to_ids(text) for text in catalogue().families[family].stops}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    if family != "qwen2" and family != "qwen3":
        config.eos_token_id = tokenizer.eos_token_id
    assert stop_ids(tmp_path, config, tokenizer) == wanted
    GenerationConfig(eos_token_id=[3]).save_pretrained(tmp_path)
    assert stop_ids(tmp_path, config, tokenizer) == wanted | {3}, "the generation config's count too"


def test_the_tokenizers_own_template_counts_more_than_the_catalogues(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "vicuna-7b-v1.3", "{{ messages[0]['content'] }}!")
    assert encode_prompt(load_tokenizer(path, str(path)), "hi") == encode(load_tokenizer(path, str(path)), "hi!")


def test_a_target_that_is_no_chat_model_gets_no_template() -> None:
    for name in ("meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-8B-Base", "/somewhere/gpt2"):
        assert family_of(name) is None
    assert family_of("meta-llama/Meta-Llama-3-8B-Instruct@main") == catalogue().families["llama-3"]


def test_roles_that_do_not_take_turns_are_refused(tokenizers) -> None:
    told = [{"role": "assistant", "content": "ho"}, {"role": "user", "content": "hi"}]
    for name in ("Llama-2-7b-chat-hf", "vicuna-7b-v1.3", "Mistral-7B-Instruct-v0.2"):
        with pytest.raises(UsageError, match="take turns"):
            encode_prompt(tokenizers[name], told)


def test_a_system_turn_goes_where_the_family_has_it(tokenizers) -> None:
    told = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert _rendered(tokenizers["Llama-2-7b-chat-hf"], told, True) == "<s>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\nhi [/INST]"
    assert _rendered(tokenizers["vicuna-7b-v1.3"], told, True) == "<s>be kind USER: hi ASSISTANT:"
    assert _rendered(tokenizers["Qwen2-7B-Instruct"], told, True).startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi")
