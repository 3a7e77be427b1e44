"""Every method has a colour of its own that can be told from the others, whatever a person's colour vision."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from app.methods import METHODS, OTHER, method
from app.offers import EMBEDDED_NAME, shipped_heads

# what a person sees who lacks one kind of cone (Machado, Oliveira, Fernandes 2009, severity 1.0), in linear RGB
VISION = {
    "full": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
TO_LAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])  # Oklab
ENTRIES = (*METHODS.values(), OTHER)


def linear(colour: str) -> np.ndarray:
    """#rrggbb -> linear RGB."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(colour: str, paper: str) -> float:
    light, dark = sorted((float(linear(one) @ [0.2126, 0.7152, 0.0722]) for one in (colour, paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_lie_apart_for_every_kind_of_vision(vision: str, theme: str) -> None:
    seen = {
        entry.key: TO_LAB @ np.cbrt(TO_LMS @ np.clip(VISION[vision] @ linear(getattr(entry, theme)), 0, 1)) for entry in METHODS.values()
    }
    nearest = min(combinations(seen, 2), key=lambda pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]))
    assert np.linalg.norm(seen[nearest[0]] - seen[nearest[1]]) > 0.07, nearest  # 0.02 is about what an eye can just tell


def test_colours_stand_out_from_the_paper() -> None:
    assert all(contrast(entry.light, "#ffffff") >= 3 and contrast(entry.dark, "#161b22") >= 3 for entry in ENTRIES)


def test_heads_are_offered_in_the_order_of_the_methods(tmp_path: Path) -> None:
    for name in ("medusa", "koala-medusa", "hass-koala", "hass", "eagle", "koala-eagle"):
        (tmp_path / name).mkdir()
        layers = {"medusa_num_layers": 1} if "medusa" in name else {"num_hidden_layers": 1}
        (tmp_path / name / "config.json").write_text(json.dumps({**layers, "draftscope": {"method": name, "target": EMBEDDED_NAME}}))
    offers = [offer for _, offer in shipped_heads(tmp_path)]
    assert [offer.source for offer in offers] == ["eagle", "hass", "koala-eagle", "hass-koala", "medusa", "koala-medusa"]
    assert all(offer.layers == 1 for offer in offers)


def test_all_methods_of_the_field_are_known_and_said_in_a_sentence() -> None:
    for key in ("eagle", "hass", "koala-eagle", "hass-koala", "medusa", "koala-medusa"):
        assert method(key).about.endswith(".") and method(key).label != OTHER.label
    assert method("something new") is OTHER
