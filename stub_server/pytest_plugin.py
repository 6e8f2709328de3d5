"""A pytest fixture for users' own tests: ``stub_server(model_path, **options)`` starts servers and stops them
at teardown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .server import StubServer


@pytest.fixture
def stub_server() -> Iterator[Callable[..., StubServer]]:
    """A factory of running servers on free ports; the options are those of ``stub_server.StubServer``."""
    with ExitStack() as running:

        def start(model_path: str | os.PathLike[str], **options: Any) -> StubServer:
            from .server import StubServer

            return running.enter_context(StubServer(model_path, **options))

        yield start
