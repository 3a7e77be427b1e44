"""What `python -m tests.check_space` checks without starting the app; the rest of it takes minutes and is run by hand."""

import pytest

from tests import check_space


def test_the_card_the_files_and_the_imports_are_those_of_a_space() -> None:
    assert check_space.check_card().startswith("gradio 6.")
    assert " files, " in check_space.check_files()
    assert " modules" in check_space.check_imports()


def test_a_file_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_space, "LARGEST", 8_000_000)
    with pytest.raises(AssertionError, match=r"over 8 MB: assets/heads/.*safetensors \(8\.\d MB\)"):
        check_space.check_files()
