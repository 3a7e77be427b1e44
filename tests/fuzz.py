"""Bad input, by the thousand: `python -m tests.fuzz --cases 23500`. A short version runs in the suite (tests/app/test_input.py).

Prompts, settings, Run files and addresses come from hypothesis. Whatever comes in, the answer is a result or a UsageError in one line
that holds no markup: no other exception, no hang. A third of the cases is right by construction, and must be taken. Run files are also
cut, changed at random places, packed as bombs and made huge.
"""

import argparse
import copy
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.address import link, read_address
from app.comparison import Request
from app.library import load_uploaded
from app.lossless import lossless_panel, shown
from app.messages import pack, refusal
from app.operator import Operator
from app.page import read_settings
from app.view import session_of, settings_line
from decoding.chat import encode_prompt
from decoding.embedded import embedded_path
from decoding.errors import UsageError
from decoding.records import Run, Settings, TreeShape
from tests.records import make_run

SECONDS = 20  # of computing, the longest that one input may take
CONTROL = "<|endoftext|>"
MARKUP = [
    "<script>alert(1)</script>",
    "</script>",
    "<img src=x onerror=alert(1)>",
    CONTROL,
    "<|im_end|>",
    "\x00",
    "\u202e",
    "🌳",
    "&lt;",
    "'\"",
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(MARKUP),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 1e308, 2**63, 2**64, 10**30, float("nan"), float("inf")]) | anything
ids = st.integers(0, 2**31 - 1)
good_settings = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 131072),
        "temperature": st.floats(0, 10),
        "top_p": st.floats(0.001, 1),
        "top_k": st.integers(0, 1 << 30),
        "seed": st.integers(0, 2**63 - 1),
        "tree_depth": st.integers(1, 16),
        "tree_top_k": st.integers(1, 64),
        "tree_nodes": st.integers(1, 512),
        "stop_token_ids": st.none() | st.lists(ids, max_size=4),
    },
)
texts = st.lists(st.text(max_size=30) | st.sampled_from(MARKUP), max_size=5).map("".join)


def refused(attempt: Callable[[], Any]) -> bool:
    """Whether it was refused in one clear line; anything but a result or such a line is an error."""
    start = time.thread_time()
    try:
        attempt()
        return False
    except UsageError as error:
        assert str(error) and len(str(error)) < 2000 and "\n" not in str(error).strip(), repr(str(error))[:300]
        assert "<" not in refusal(str(error)), "markup in a message as it is sent"
        return True
    finally:
        assert time.thread_time() - start < SECONDS, "took too long"


class Cases:
    """Runs one property many times and counts what happened."""

    def __init__(self, scale: float = 1.0) -> None:
        self.counts: Counter = Counter()
        self.scale = scale
        self.folder = Path(tempfile.mkdtemp(prefix="draftscope-fuzz-"))
        self.tokenizer = AutoTokenizer.from_pretrained(embedded_path())
        self.record = make_run([[6, 7], [8], [9, 10, 12]]).model_dump(mode="json", by_alias=True)

    def run(self, name: str, cases: int, strategy: st.SearchStrategy, check: Callable[[Any], bool]) -> None:
        @settings(max_examples=max(1, int(cases * self.scale)), deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def one(value: Any) -> None:
            self.counts[f"{name}: {'refused' if check(value) else 'taken'}"] += 1

        one()

    # ---- what comes in -----------------------------------------------------------------------------------------------
    def prompts(self) -> None:
        """Typed control tokens are text; any Unicode is encoded or refused; a limit holds."""
        control = Counter({token: 99 for token, added in self.tokenizer.added_tokens_decoder.items() if added.special})
        frame = Counter(encode_prompt(self.tokenizer, "x")) & control  # what the template itself puts around a turn
        operator = Operator(max_prompt_chars=100)

        def check(prompt: str) -> bool:
            def attempt() -> None:
                operator.check(prompt, ("autoregressive",), Settings())
                ids = encode_prompt(self.tokenizer, prompt)
                assert Counter(ids) & control == frame, "a typed control token was read as one"

            return refused(attempt)

        self.run("prompts", 4000, texts, check)

    def settings(self) -> None:
        """The page's fields and the API's names, of any type and size."""
        names = list(Settings.model_fields)
        self.run(
            "settings of the page", 3000, st.lists(numbers, min_size=8, max_size=8), lambda values: refused(lambda: read_settings(values))
        )
        fields = st.dictionaries(st.sampled_from([*names, "other"]), numbers, max_size=5)
        self.run("settings of the API", 2000, fields, lambda values: refused(lambda: Settings(**values)))

        def good(values: dict[str, Any]) -> bool:
            """In range, so they are taken, written and read back; with a head's tree they agree, or it is said why not."""
            read = Settings(**values)
            assert Settings(**json.loads(read.model_dump_json())) == read
            assert (settings_line(read) and "<" not in settings_line(read)) or not values
            refused(lambda: Operator().check_settings(read))
            refused(lambda: read.resolved(TreeShape()).tree.check())
            return False

        self.run("settings in range", 2000, good_settings, good)

    def requests(self) -> None:
        """What the page and the API ask for, with values of any kind in one place or none."""
        good = st.fixed_dictionaries(
            {"prompt": texts.filter(str.strip), "methods": st.lists(st.text(max_size=20), min_size=1, max_size=4), "target": st.text()}
        )
        bad = st.dictionaries(st.sampled_from(["prompt", "methods", "target"]), anything | st.just("\ud83d"), max_size=1)

        def check(value: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> bool:
            asked, wrong, values = value

            def attempt() -> None:
                request = Request(**asked | wrong, settings=Settings(**values), session="s")
                Operator(max_lanes=4).check(request.prompt, request.methods, Settings())
                link(request.prompt, request.ordered(), request.settings).encode()

            told = refused(attempt)
            assert wrong or not told, "a good request was refused"
            return told

        self.run("requests", 2000, st.tuples(good, bad, good_settings), check)

    def addresses(self) -> None:
        """Queries of any text; what is taken can be written back."""
        keys = st.sampled_from(["run", "lane", "step", "prompt", "methods", *Settings.model_fields]) | st.text(max_size=8)
        values = st.text(max_size=30) | numbers.map(str) | st.sampled_from(MARKUP)

        def check(query: dict[str, str]) -> bool:
            def attempt() -> None:
                address = read_address(query)
                link(address.prompt or "", address.methods, Settings())
                assert "<" not in pack(session_of([make_run([[6]])], "s", "live", address.run or ""))

            return refused(attempt)

        self.run("addresses", 2000, st.dictionaries(keys, values, max_size=6), check)

        def linked(value: tuple[str, list[str], dict[str, Any]]) -> bool:
            """A copied link opens what was asked for."""
            prompt, methods, values = value
            asked = Settings(**values)
            opened = read_address(dict(parse_qsl(link(prompt, methods, asked), keep_blank_values=True)))
            assert (opened.prompt or "") == prompt and opened.methods == methods
            assert opened.checked() == asked.model_copy(update={"stop_token_ids": None})
            return False

        names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=","), min_size=1, max_size=12)
        self.run("links", 2000, st.tuples(texts, st.lists(names, max_size=4), good_settings), linked)

    def records(self) -> None:
        """Run files: fields changed to anything, texts cut, bytes changed."""
        paths = list(_paths(self.record))

        def changed(change: tuple[list, Any, bool]) -> str:
            path, value, drop = change
            record = copy.deepcopy(self.record)
            holder = record
            for key in path[:-1]:
                holder = holder[key]
            if drop and isinstance(holder, dict):
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            return json.dumps(record)

        def good(value: tuple[list[list[int]], list[int], dict[str, Any]]) -> bool:
            """Whole records, a lane with a head beside plain decoding: taken, and the same when read back."""
            drafted, plain, told = value
            runs = [make_run(drafted, **told), make_run([[token] for token in plain], plain=True, **told)]
            assert all(Run.from_json(run.to_json()) == run for run in runs)
            assert not self._upload(*(run.to_json() for run in runs)), "a good record was refused"
            return False

        marked = {"device": "<b>", "dtype": "<i>", "threads": 1, "machine": "<script>", "versions": {"<u>": "<s>"}, "notes": ["<a>"]}
        ends = st.sampled_from(["stop", "length", "cancelled", "error"])
        told = st.fixed_dictionaries(
            {"text": texts, "target": texts, "prompt_text": texts, "finish_reason": ends},
            optional={
                "token_texts": st.dictionaries(ids, texts, max_size=6),
                "error": st.none() | texts,
                "environment": st.just(marked),
            },
        )
        path = st.lists(ids, min_size=1, max_size=5)
        whole = st.tuples(st.lists(path, min_size=1, max_size=6), st.lists(ids, min_size=1, max_size=8), told)
        self.run("records, whole", 2000, whole, good)
        fields = st.tuples(st.sampled_from(paths), numbers, st.booleans()).map(changed)
        self.run("records, a field changed", 2000, fields, self._upload)
        text = json.dumps(self.record)
        cuts = st.integers(0, len(text)).map(lambda at: text[:at])
        self.run("records, cut", 500, cuts, self._upload)
        swaps = st.tuples(st.integers(0, len(text) - 1), st.characters()).map(lambda swap: text[: swap[0]] + swap[1] + text[swap[0] + 1 :])
        self.run("records, a character changed", 1000, swaps, self._upload)
        self.run("records, anything", 500, anything.map(lambda value: json.dumps(value)), self._upload)
        self.run("records, bytes", 500, st.binary(max_size=200), self._upload)

    def large(self) -> None:
        """Files that are made to cost: 10^6 nodes, deep nesting, huge numbers, bombs."""
        step = self.record["steps"][0]
        many = {**self.record, "steps": [{**step, "node_ids": [1] * 10**6, "parents": [-1] * 10**6}]}
        loops = {**self.record, "steps": [{**step, "parents": [1, 0, *step["parents"][2:]]}]}
        for name, text in {
            "a million nodes": json.dumps(many),
            "parents in a circle": json.dumps(loops),
            "nested": "[" * 10**6,
            "nested objects": '{"a":' * 10**5,
            "a number of a million digits": json.dumps(self.record).replace("10.0", "1" * 10**6, 1),
            "a million token texts": json.dumps({**self.record, "token_texts": {str(i): "x" for i in range(10**6)}}),
            "a text of ten million characters": json.dumps({**self.record, "text": "<b>" * 3_000_000}),
        }.items():
            self.counts[f"{name}: {'refused' if self._upload(text) else 'taken'}"] += 1
        bomb = self.folder / "bomb.json.gz"
        with gzip.open(bomb, "wb", compresslevel=9) as file:
            for _ in range(300):
                file.write(b"[" * (1 << 20))
        assert refused(lambda: load_uploaded([str(bomb)])), "a bomb was taken"
        self.counts["bomb of 300 MB: refused"] += 1

    def _upload(self, *contents: str | bytes) -> bool:
        """As the page does it: read the files, make the message and the panels of what was taken."""
        paths = [self.folder / f"upload-{index}.json" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

        def attempt() -> None:
            runs: list[Run] = load_uploaded(list(map(str, paths)))
            assert "<" not in pack(session_of(runs, "uploaded", "uploaded", "")), "markup in what the page gets"
            panel = lossless_panel(runs)
            assert "<script" not in panel and "<img" not in panel
            assert not {"<", ">"} & set(shown(runs[0].text))

        return refused(attempt)

    def all(self) -> Counter:
        for part in (self.prompts, self.settings, self.requests, self.addresses, self.records, self.large):
            part()
        return self.counts


def _paths(value: Any, above: tuple = ()) -> Any:
    """Where each value of a record stands."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield [*above, key]
        if isinstance(inner, (dict, list)):
            yield from _paths(inner, (*above, key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=23_500, help="about how many")
    options = parser.parse_args()
    counts = Cases(options.cases / 23_500).all()
    print(sum(counts.values()), "cases:", dict(sorted(counts.items())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
