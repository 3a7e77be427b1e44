"""A tiny target with words: the golden weights and a tokenizer made here, so that the page can be tried without a download."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEXT = (
    "the of and a to in is was he for it with as his on be at by I this had not are but from or have an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into than them "
    "can only other new some could time these two may then do first any my now such like our over man me even most made after "
    "also did many before must through back years where much your way well down should because each just those people how too "
    "little state good very make world still own see men work long get here between both life being under never day same "
    "another know while last might us great old year off come since against go came right used take three "
)
WORDS = TEXT.split()
# tokens that a page may get wrong: markup, quotes, whitespace, bytes, right-to-left text, emoji, no text at all
HOSTILE = [
    "<script>alert(1)</script>",
    "</div>",
    '"><img src=x onerror=alert(2)>',
    "${value}",
    "{{value}}",
    "`",
    "\\",
    "\n",
    "\t",
    "  ",
    "\u202eabc",
    "شلوم",
    "שלום",
    "👩‍👩‍👧‍👦",
    "é",
    "\u200b",
    "&lt;",
    "'",
    "x" * 10_000,
    "-->",
    "\u0000",
    "漢字",
]


def words(hostile: bool = False) -> list[str]:
    """257 different token texts; a space stands before most of them, as in real vocabularies."""
    base = list(HOSTILE) if hostile else []
    plain = [f" {word}" for word in WORDS] + [f" {word}s" for word in WORDS] + [f" {word}er" for word in WORDS]
    return [*list(dict.fromkeys([*base, *plain]))[:256], "<|end|>"]


def tiny_target(folder: Path, hostile: bool = False) -> Path:
    """Write the tiny target to `folder` and return it."""
    shutil.copytree(GOLDEN / "tiny_base", folder, dirs_exist_ok=True)
    vocabulary = {text: index for index, text in enumerate(words(hostile))}
    assert len(vocabulary) == 257
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" the" if not hostile else " of"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def tiny_head(source: str, folder: Path, method: str, target: str) -> Path:
    """Copy a golden head and let its config say which method it is."""
    shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["draftscope"] = {"method": method, "target": target}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
