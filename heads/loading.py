"""Find a head by name, folder or hub id, and bind it to a target."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from decoding import hub
from decoding.errors import UsageError
from decoding.head import DraftHead
from decoding.hub import Progress, silent
from decoding.target import Target
from decoding.tuning import tuned_for
from heads.catalogue import catalogue
from heads.layouts import recognise
from heads.medusa import MedusaDraftHead
from heads.session import FeatureDraftHead


def load_head(source: str, target: Target, progress: Progress = silent, draft_vocab: int | None = None) -> DraftHead:
    """Load a draft head and bind it to its target.

    Args:
        source: name of a shipped head, a folder, or a hub id ('org/name', 'org/name@revision'); the layout is recognised
            from what is in it.
        progress: is told how far fetching it is.
        draft_vocab: let the head propose only that many of the most frequent tokens (FR-Spec, arXiv 2502.14856), which makes
            its `lm_head` cheaper; None = those it was trained with.

    A tree that `python -m decoding tune` found for this machine, or else was shipped for its kind of device and dtype, takes the
    place of the one that came with the head.

    Raises:
        UsageError: unknown head, or one that does not fit the target.
        DraftscopeError: the hub can't be reached.
    """
    folder = find_head(source, progress)
    layout = MedusaDraftHead if recognise(folder) == "medusa" else FeatureDraftHead
    name = Path(source if Path(source).is_dir() else source.partition("@")[0]).name
    head = layout.load(folder, target, name, draft_vocab)
    tuned = tuned_for(target, head)
    if tuned is not None:
        head.tree = tuned.tree
    return head


def load_heads(sources: Sequence[str], target: Target, draft_vocab: int | None = None) -> list[DraftHead]:
    """Heads that are told side by side: where two have one name, each is called by its source.

    Raises:
        UsageError: as load_head, or a source given twice.
    """
    twice = [source for source, times in Counter(sources).items() if times > 1]
    if twice:
        raise UsageError(f"--head {twice[0]} is given twice")
    heads = [load_head(source, target, draft_vocab=draft_vocab) for source in sources]
    names = Counter(head.name for head in heads)
    for head, source in zip(heads, sources, strict=True):
        if names[head.name] > 1:
            head.name = source
    return heads


def find_head(source: str, progress: Progress = silent) -> Path:
    """The folder of a head's files, fetched if they are not here yet (see decoding.hub.find)."""
    shipped = catalogue()
    if source in shipped:
        return shipped[source]
    if not Path(source).is_dir() and hub.parse_id(source) is None:
        raise UsageError(
            f"unknown head {source!r}: shipped are {', '.join(shipped) or 'none'}; or give a folder or a hub id such as 'org/name'"
        )
    return hub.find("head", source, progress)
