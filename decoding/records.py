"""Run records: settings, steps and runs as plain data. No torch, no gradio: a record is read and drawn anywhere."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from decoding.errors import UsageError
from decoding.written import write_text

SCHEMA = "draftscope.run/1"
MAX_RECORD_BYTES = 64 << 20  # a 2,048-token run with full trees is about 20 MB
MAX_TREE_DEPTH, MAX_TREE_TOP_K, MAX_TREE_NODES = 16, 64, 512

AUTOREGRESSIVE = "autoregressive"
FinishReason = Literal["stop", "length", "cancelled", "error"]
NodeStatus = Literal["accepted", "rejected", "unreached"]

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1.0001, allow_inf_nan=False)]
LogProbability = Annotated[float, Field(le=0.001, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _texts(value: Any) -> Any:
    """Stops at the first entry that is no text (pydantic would list every one of a million)."""
    if isinstance(value, dict):
        for key, text in value.items():
            if not isinstance(text, str):
                raise ValueError(f"{str(key)[:40]!r}: text was expected")
    return value


def _token_texts(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal() and len(key) <= 10)):
                raise ValueError(f"{str(key)[:40]!r}: a token id was expected")
    return _texts(value)


# a broken record is told by its first error: lists and texts stop there, so that a large file can't cost memory or minutes
_Entry = TypeVar("_Entry")
Entries = Annotated[list[_Entry], Field(fail_fast=True)]
Texts = Annotated[dict[str, str], BeforeValidator(_texts)]
TokenTexts = Annotated[dict[int, str], BeforeValidator(_token_texts)]


def first_error(error: ValidationError) -> str:
    """The first thing wrong, in one line that names the field."""
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if isinstance(values, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in values if name not in known and name not in cls.model_fields), None)
            if unknown is not None:
                raise ValueError(f"unknown field {str(unknown)[:40]!r}, possible are {', '.join(sorted(known))}")
        return values


class TreeShape(NamedTuple):
    """Tree settings: drafted levels, children per node and beam width, drafted nodes that are verified (no root)."""

    depth: int = 6
    top_k: int = 10
    nodes: int = 59

    @property
    def pool(self) -> int:
        """Candidates an EAGLE-2 draft has to choose from: top_k at depth 1, top_k * top_k at each deeper level."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    def check(self) -> "TreeShape":
        """Raises UsageError where the fields contradict each other."""
        if self.nodes > self.pool:
            raise UsageError(
                f"tree_nodes {self.nodes} is more than the {self.pool} candidates that tree_depth {self.depth} and "
                f"tree_top_k {self.top_k} give: lower tree_nodes to {self.pool} or raise the others"
            )
        return self


class Settings(_Record):
    """What a person asks of a run. Tree fields that were not set take the head's tuned defaults."""

    max_new_tokens: int = Field(128, ge=1, le=131072)
    temperature: float = Field(0.0, ge=0, le=10, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, le=1 << 30)
    seed: int = Field(0, ge=0, lt=1 << 63)
    tree_depth: int = Field(TreeShape().depth, ge=1, le=MAX_TREE_DEPTH)
    tree_top_k: int = Field(TreeShape().top_k, ge=1, le=MAX_TREE_TOP_K)
    tree_nodes: int = Field(TreeShape().nodes, ge=1, le=MAX_TREE_NODES)
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True)] | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UsageError(f"setting {first_error(error)}") from error

    @property
    def tree(self) -> TreeShape:
        return TreeShape(self.tree_depth, self.tree_top_k, self.tree_nodes)

    def resolved(self, tuned: TreeShape | None) -> "Settings":
        """With every tree field decided: the set ones as they are, the others from `tuned` (cut to what they allow).

        Raises:
            UsageError: the tree fields contradict each other.
        """
        if tuned is None:
            return self
        named = {"tree_depth": tuned.depth, "tree_top_k": tuned.top_k, "tree_nodes": tuned.nodes}
        given = {name: getattr(self, name) for name in named if name in self.model_fields_set}
        shape = TreeShape(*{**named, **given}.values())
        if "tree_nodes" not in given:  # hand-set depth or width win: the default budget follows them
            shape = shape._replace(nodes=min(shape.nodes, shape.pool))
        shape.check()
        return self.model_copy(update={"tree_depth": shape.depth, "tree_top_k": shape.top_k, "tree_nodes": shape.nodes})


class Environment(_Record):
    """Where a run was measured."""

    device: str
    dtype: str
    threads: int = Field(ge=1)
    machine: str = ""
    versions: Texts = {}
    notes: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()


class HeadInfo(_Record):
    """What a run says of its draft head."""

    method: str
    layers: int = Field(ge=1)
    parameters: int = Field(ge=0)
    draft_vocab_size: int = Field(ge=1)
    dtype: str = ""  # that it drafts in; "" = the environment's
    adversary: bool = False
    align_steps: int = Field(1, ge=1)
    tokens_seen: int | None = None


class Step(_Record):
    """One draft + target forward + accept + commit. Lists named after nodes are parallel, in the EAGLE-2 order.

    A step of plain decoding has no nodes and emits one token.
    """

    index: int = Field(ge=0)
    root_id: TokenId
    node_ids: Entries[TokenId] = []
    parents: Entries[int] = []  # index of the parent node, -1 = root
    depths: Entries[int] = []  # root = 0
    draft_logprobs: Entries[LogProbability] = []  # given the parent, temperature 1
    scores: Entries[LogProbability] = []  # cumulative
    target_probs: Entries[Probability] = []  # at the parent, after temperature and filters (temperature 0: softmax at 1)
    status: Entries[NodeStatus] = []
    draws: Entries[Probability | None] = []  # sampling: the uniform number that decided this node; None = was not tested
    accepted: Entries[int] = []  # node indices, in order
    bonus_id: TokenId
    token_ids: Entries[TokenId]  # emitted: accepted nodes, then the bonus; cut at stop or length
    margins: Entries[Finite] = []  # greedy: best minus second-best logit where each of (accepted..., bonus) was chosen
    runner_up_ids: Entries[TokenId] = []  # greedy: the second-best token there
    # along root + accepted nodes, where the head drafted from them: draft feature against target feature,
    # and the shared mass of draft and target distribution (sum of minima), None where not measured
    drift_cosine: Entries[Finite | None] = []
    drift_distance: Entries[Finite | None] = []
    overlap: Entries[Probability | None] = []
    start_ms: Milliseconds  # on the run's own clock, which stands still while the consumer of the stream holds it
    draft_ms: Milliseconds
    verify_ms: Milliseconds
    accept_ms: Milliseconds
    commit_ms: Milliseconds
    record_ms: Milliseconds = 0.0  # making this record
    context_length: int = Field(ge=1)  # committed tokens before the step, root not counted

    @property
    def total_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.accept_ms + self.commit_ms + self.record_ms

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.total_ms

    @model_validator(mode="after")
    def _consistent(self) -> "Step":
        nodes = len(self.node_ids)
        for name in ("parents", "depths", "draft_logprobs", "scores", "target_probs", "status"):
            if len(getattr(self, name)) != nodes:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {nodes} nodes")
        if self.draws and len(self.draws) != nodes:
            raise ValueError(f"draws has {len(self.draws)} entries for {nodes} nodes")
        for index, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            if not -1 <= parent < index:
                raise ValueError(f"parents.{index} is {parent}: a parent comes before its child, -1 is the root")
            if depth != (self.depths[parent] if parent >= 0 else 0) + 1:
                raise ValueError(f"depths.{index} is {depth}, one more than its parent's was expected")
        above = -1
        for place, index in enumerate(self.accepted):
            if not 0 <= index < nodes or self.parents[index] != above or self.status[index] != "accepted":
                raise ValueError(f"accepted.{place} is {index}: not a path from the root of accepted nodes")
            above = index
        if self.status.count("accepted") != len(self.accepted):
            raise ValueError("status marks other nodes as accepted than the accepted path")
        emitted = [self.node_ids[index] for index in self.accepted] + [self.bonus_id]
        if not self.token_ids or self.token_ids != emitted[: len(self.token_ids)]:
            raise ValueError("token_ids are not the accepted nodes' tokens and the bonus token")
        for name in ("margins", "runner_up_ids"):
            if len(getattr(self, name)) not in (0, len(emitted)):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(emitted)} chosen tokens")
        return self


class Run(_Record):
    """Everything one generation did."""

    schema_: Literal["draftscope.run/1"] = Field(SCHEMA, alias="schema")
    target: str
    head: str | None  # None = plain decoding
    method: str
    head_info: HeadInfo | None = None
    settings: Settings
    environment: Environment
    created: str = ""  # ISO 8601, UTC
    prompt_ids: Entries[TokenId] = Field(min_length=1)
    prompt_text: str = ""
    prefill_ms: Milliseconds
    first_id: TokenId | None  # comes from the prefill; None where the run ended before it
    steps: Entries[Step]
    output_ids: Entries[TokenId]  # new tokens only, cut at the stop token (included) and at max_new_tokens
    text: str
    token_texts: TokenTexts = {}  # text of every token id that occurs; broken UTF-8 as <0xE2>
    finish_reason: FinishReason
    error: str | None = None
    peak_memory_bytes: int | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)

    @property
    def schema(self) -> str:  # type: ignore[override]
        return self.schema_

    @model_validator(mode="after")
    def _consistent(self) -> "Run":
        emitted = [] if self.first_id is None else [self.first_id]
        root, context, clock = self.first_id, len(self.prompt_ids), self.prefill_ms
        for index, step in enumerate(self.steps):
            if step.index != index:
                raise ValueError(f"steps.{index}.index is {step.index}")
            if step.root_id != root:
                raise ValueError(f"steps.{index}.root_id is not the token that the step before it ended with")
            if step.context_length != context:
                raise ValueError(f"steps.{index}.context_length is {step.context_length}, but {context} tokens are committed there")
            if step.start_ms < clock - 0.01:  # sums of floats
                raise ValueError(f"steps.{index}.start_ms is {step.start_ms}, but the work before it ended at {clock}")
            if index < len(self.steps) - 1 and len(step.token_ids) <= len(step.accepted):
                raise ValueError(f"steps.{index}.token_ids are cut: only the last step may emit fewer tokens than it accepted")
            emitted += step.token_ids
            root, context, clock = step.bonus_id, context + 1 + len(step.accepted), step.end_ms
        if self.output_ids != emitted:
            raise ValueError("output_ids are not the tokens that first_id and the steps emitted")
        if (self.head is None) != (self.method == AUTOREGRESSIVE):
            raise ValueError(f"method {self.method!r} does not go with head {self.head!r}")
        return self

    def token_text(self, token_id: int) -> str:
        return self.token_texts.get(token_id, f"<{token_id}>")

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as JSON, aside and then renamed: never half a file, and only its owner reads what a visitor wrote."""
        write_text(Path(path), self.to_json(), mode=0o600)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """Read a record.

        Raises:
            UsageError: unreadable, too large, or not a record; the message names the field.
        """
        path = Path(path)
        try:
            if path.stat().st_size > MAX_RECORD_BYTES:
                raise UsageError(f"{path.name} is larger than {MAX_RECORD_BYTES >> 20} MB: not a run record")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path.name} can't be read: {getattr(error, 'strerror', None) or 'not a text file'}") from error
        return cls.from_json(text, path.name)

    @classmethod
    def from_json(cls, text: str, name: str = "record") -> "Run":
        """Like `load`, from text; `name` is what messages call it."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                raise UsageError(f"{name} is not JSON: {error.errors()[0]['ctx']['error']}") from error
            found = _schema_of(text)
            if found != SCHEMA:
                raise UsageError(f"{name} is not a Draftscope run: schema is {found!r:.60}, expected {SCHEMA!r}") from error
            raise UsageError(f"{name} is not a valid run record: {first_error(error)}") from error


def _schema_of(text: str) -> Any:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return raw.get("schema") if isinstance(raw, dict) else None
