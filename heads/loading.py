"""Find a head by name, folder or hub id, and bind it to a target."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from decoding.errors import DraftscopeError, UsageError
from decoding.head import DraftHead
from decoding.target import Target
from heads.catalogue import catalogue
from heads.medusa import MedusaDraftHead, is_medusa
from heads.session import FeatureDraftHead


def load_head(source: str, target: Target) -> DraftHead:
    """Load a draft head and bind it to its target.

    Args:
        source: name of a shipped head, a folder, or a hub id; the layout is recognised from what is in it.

    Raises:
        UsageError: unknown head, or one that does not fit the target.
        DraftscopeError: the hub can't be reached.
    """
    folder = _folder(source)
    layout = MedusaDraftHead if is_medusa(folder) else FeatureDraftHead
    return layout.load(folder, target, name=Path(source).name)


def _folder(source: str) -> Path:
    shipped = catalogue()
    if source in shipped:
        return shipped[source]
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UsageError(
            f"unknown head {source!r}: shipped are {', '.join(shipped) or 'none'}; or give a folder or a hub id such as 'org/name'"
        )
    try:
        wanted = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "medusa_lm_head.pt"]
        return Path(snapshot_download(source, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DraftscopeError(f"head {source!r} can't be had from the hub: {str(error).strip().splitlines()[0]}") from error
