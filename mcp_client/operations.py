"""What a client asks of its servers beside inference: what they are and have, how they did, load and unload. Flows.

Several endpoints are replicas of one another: what is true of each of them alone (statistics), and what changes them (load,
unload), is asked of every one, in turn and without retries; the rest of any one that answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from .effects import Call, Endpoint, Flow, Send
from .errors import ConfigurationError, MCPError, NotOfferedError
from .exchanges import placed
from .flow import Engine
from .management import IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from .tensors import ModelMetadata

T = TypeVar("T")


def server(engine: Engine, call: Call) -> Flow[ServerInfo]:
    info: ServerInfo = yield from _ask_one(engine, call, "server")
    return info


def metadata(engine: Engine, call: Call) -> Flow[ModelMetadata]:
    return (yield from placed(call, engine.describe(call)))


def models(engine: Engine, call: Call) -> Flow[list[str]]:
    return (yield from placed(call, engine.models(call)))


def index(engine: Engine, call: Call) -> Flow[list[IndexEntry]]:
    entries: list[IndexEntry] = yield from _ask_one(engine, call, "index")
    return entries


def config(engine: Engine, call: Call) -> Flow[ModelConfig]:
    model = yield from engine.name_of(call)
    told: ModelConfig = yield from _ask_one(engine, call, "config", model, call.version)
    return told


def statistics(engine: Engine, call: Call) -> Flow[list[ModelStatistics]]:
    """Of the model that the call names, else of all of them."""
    told = yield from _ask_all(engine, call, "statistics", call.model, call.version)
    return [replace(each, endpoint=endpoint.url) for endpoint, models in told for each in models]


def load(
    engine: Engine, call: Call, config: str | Mapping[str, Any] | None, files: Mapping[str, bytes]
) -> Flow[None]:
    try:
        yield from _ask_all(engine, call, "load", call.model, config, files)
    finally:
        yield from engine.forget(call.model)


def unload(engine: Engine, call: Call, dependents: bool) -> Flow[None]:
    try:
        yield from _ask_all(engine, call, "unload", call.model, dependents)
    finally:
        yield from engine.forget(call.model)


def live(engine: Engine, call: Call) -> Flow[bool]:
    return (yield from _any_says_yes(engine, call, "live"))


def ready(engine: Engine, call: Call) -> Flow[bool]:
    """Whether a server is ready, or the model that the call names, by the deadline."""
    if call.model:
        return (yield from _any_says_yes(engine, call, "model_ready", call.model, call.version))
    return (yield from _any_says_yes(engine, call, "ready"))


def _any_says_yes(engine: Engine, call: Call, question: str, *arguments: Any) -> Flow[bool]:
    for endpoint in tuple(engine.endpoints):
        try:
            if (yield from _exchange(engine, call, endpoint, question, *arguments)):
                return True
        except MCPError:
            continue  # no is the answer, whatever the reason
    return False


def _ask_one(engine: Engine, call: Call, question: str, *arguments: Any) -> Flow[Any]:
    _require_a_server(engine)

    def exchange(endpoint: Endpoint) -> Flow[Any]:
        return (yield from _exchange(engine, call, endpoint, question, *arguments))

    return (
        yield from placed(call, engine.servers.with_retries(call, call.deadline, exchange, repeatable=True))
    )


def _ask_all(engine: Engine, call: Call, question: str, *arguments: Any) -> Flow[list[tuple[Endpoint, Any]]]:
    """The answer of every endpoint. The first error is raised once all were asked."""
    _require_a_server(engine)
    answers: list[tuple[Endpoint, Any]] = []
    failure: MCPError | None = None
    for endpoint in tuple(engine.endpoints):
        try:
            answers.append((endpoint, (yield from _exchange(engine, call, endpoint, question, *arguments))))
        except MCPError as error:
            failure = failure or error.at(request_id=call.id, endpoint=endpoint.url, attempts=1)
    if failure is not None:
        raise failure
    return answers


def _exchange(engine: Engine, call: Call, endpoint: Endpoint, question: str, *arguments: Any) -> Flow[Any]:
    """Ask the codec's ``question`` of one endpoint; its ``decode_…`` reads the answer."""
    codec: Any = yield from engine.servers.codec(endpoint, call.deadline)
    ask: Callable[..., Any] | None = getattr(codec, question, None)
    if ask is None:
        raise NotOfferedError(
            f"{endpoint.url} is spoken to in MCP's own protocol, which has no {question!r}; "
            "protocol='oip' asks for it in the Open Inference Protocol, if the server speaks that",
            status=501,
        )
    response = yield Send(endpoint, ask(*arguments), call.deadline)
    return getattr(codec, f"decode_{question}")(response)


def _require_a_server(engine: Engine) -> None:
    if not len(engine.endpoints):
        raise ConfigurationError("this client has no server to ask: it was made with 'edge:' alone")
