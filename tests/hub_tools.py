"""The Hub's own client, turned to a local Hub, logged in, with a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from local_hub import TOKEN, LocalHub


def turn_to(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, cache: Path, token: str | None = TOKEN) -> None:
    """What HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_DISABLE_XET do when a process starts with them."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no_token"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    close_session()
