"""The gRPC side of the server: ``inference.GRPCInferenceService`` over the same ``Service`` as the HTTP routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mcp_client.errors import ConfigurationError, MissingExtraError, ServerError
from mcp_client.protocols import grpc_status

from .http_bodies import asked_for
from .override import read_override
from .routes_oip import SERVER_NAME, SERVER_VERSION
from .service import Parsed, Reply, Service

try:
    import grpc
    import grpc.aio
    from google.protobuf.json_format import ParseDict
    from google.protobuf.message import DecodeError

    from mcp_client.protocols import management_grpc, oip_grpc
    from mcp_client.protocols import oip_pb2 as pb
except ImportError as missing:
    raise MissingExtraError("grpc", missing.name or "grpcio", "--grpc-port") from missing

log = logging.getLogger("stub_server")

# What Triton calls these extensions in its own ServerMetadata.
EXTENSIONS = ("model_repository", "model_configuration", "statistics", "system_shared_memory")
Handler = Callable[[bytes, Any], Awaitable[bytes]]


@asynccontextmanager
async def serving(
    service: Service, addresses: Sequence[str], *, max_body_bytes: int, drain_s: Callable[[], float]
) -> AsyncIterator[None]:
    """Serve on ``addresses`` (``host:port``, ``unix:PATH``) in this event loop; at the end running calls get ``drain_s()``.

    ``service`` is the caller's to close.
    """
    server = _make_server(service, max_body_bytes)
    for address in addresses:
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigurationError(f"can't listen on {address}: {error}") from error
    await server.start()
    try:
        yield
    finally:
        await server.stop(drain_s())


def _make_server(service: Service, max_body_bytes: int) -> Any:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_send_message_length", oip_grpc.MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 1),  # StubServer holds the port with a socket of its own
        ]
    )
    routes = _Routes(service)
    unary = {name: grpc.unary_unary_rpc_method_handler(routes.observed(name)) for name in routes.METHODS}
    stream = grpc.stream_stream_rpc_method_handler(routes.stream)
    handlers = {**unary, "ModelStreamInfer": stream}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(management_grpc.SERVICE, handlers),)
    )
    return server


class _Routes:
    """One method for each of the service's, from message to message."""

    METHODS = (
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "SystemSharedMemoryStatus",
    )

    def __init__(self, service: Service) -> None:
        self._service = service
        self._models = service.models
        self._memory = service.memory

    def observed(self, name: str) -> Handler:
        """The method, with its errors answered as gRPC has them, and counted."""
        work: Handler = getattr(self, name)

        async def answer(message: bytes, context: Any) -> bytes:
            status = 200
            try:
                return await work(message, context)
            except ServerError as error:
                status = error.status
                return await _abort(context, error)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                status = 500
                log.error("gRPC method %s failed", name, exc_info=error)
                bug = ServerError.of(500, "the server failed; its log says why", code="internal")
                return await _abort(context, bug)
            finally:
                self._service.metrics.request(name, status)

        return answer

    async def _infer(self, message: bytes, headers: Mapping[str, str]) -> Reply:
        def parse() -> Parsed:
            memory = self._memory
            incoming = oip_grpc.parse_infer(message, headers, memory.read)
            return Parsed(
                incoming.request,
                lambda answer: (_CONTENT_TYPE, oip_grpc.format_infer(answer, incoming.places, memory.write)),
            )

        return await self._service.infer("oip-grpc", headers, parse)

    async def ModelInfer(self, message: bytes, context: Any) -> bytes:
        headers = _headers(context)
        reply = await self._infer(message, headers)
        if (algorithm := asked_for(headers.get("accept-encoding", ""))) is not None:
            context.set_compression(
                grpc.Compression.Gzip if algorithm == "gzip" else grpc.Compression.Deflate
            )
        await context.send_initial_metadata(_metadata(reply))
        return reply.body

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One response for each request, in their order; an error answers its request and leaves the stream open."""
        async for message in messages:
            status = 200
            try:
                reply = await self._infer(message, _headers(context))
                yield oip_grpc.in_stream(reply.body)
            except ServerError as error:
                status = error.status
                text = f"[StatusCode.{grpc_status.status_code(error.status)}] {error.message}"
                yield pb.ModelStreamInferResponse(error_message=text).SerializeToString()
            finally:
                self._service.metrics.request("ModelStreamInfer", status)

    async def ServerLive(self, message: bytes, context: Any) -> bytes:
        return bytes(pb.ServerLiveResponse(live=True).SerializeToString())

    async def ServerReady(self, message: bytes, context: Any) -> bytes:
        return bytes(pb.ServerReadyResponse(ready=bool(self._models.ready())).SerializeToString())

    async def ModelReady(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.ModelReadyRequest, message)
        try:
            self._models.get(asked.name, asked.version)
        except ServerError as error:
            if error.status != 503:
                raise
            return bytes(pb.ModelReadyResponse(ready=False).SerializeToString())
        return bytes(pb.ModelReadyResponse(ready=True).SerializeToString())

    async def ServerMetadata(self, message: bytes, context: Any) -> bytes:
        told = pb.ServerMetadataResponse(name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)
        return bytes(told.SerializeToString())

    async def ModelMetadata(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.ModelMetadataRequest, message)
        metadata = self._models.describe(asked.name, asked.version)
        await context.send_initial_metadata((("x-model-digest", metadata.digest),))
        return oip_grpc.format_metadata(metadata)

    async def ModelConfig(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.ModelConfigRequest, message)
        return management_grpc.format_config(self._models.config(asked.name, asked.version))

    async def ModelStatistics(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.ModelStatisticsRequest, message)
        told = {"model_stats": self._service.statistics(asked.name, asked.version)}
        return bytes(ParseDict(told, pb.ModelStatisticsResponse()).SerializeToString())

    async def RepositoryIndex(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.RepositoryIndexRequest, message)
        entries = self._models.index()
        return management_grpc.format_index(e for e in entries if e.state == "READY" or not asked.ready)

    async def RepositoryModelLoad(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.RepositoryModelLoadRequest, message)
        override = read_override(
            {
                name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
                for name, value in asked.parameters.items()
            }
        )
        await asyncio.get_running_loop().run_in_executor(None, self._models.load, asked.model_name, override)
        self._models.get(asked.model_name)  # raises why it could not be loaded
        return bytes(pb.RepositoryModelLoadResponse().SerializeToString())

    async def RepositoryModelUnload(self, message: bytes, context: Any) -> bytes:
        self._models.unload(_read(pb.RepositoryModelUnloadRequest, message).model_name)
        return bytes(pb.RepositoryModelUnloadResponse().SerializeToString())

    async def SystemSharedMemoryRegister(self, message: bytes, context: Any) -> bytes:
        asked = _read(pb.SystemSharedMemoryRegisterRequest, message)
        self._memory.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return bytes(pb.SystemSharedMemoryRegisterResponse().SerializeToString())

    async def SystemSharedMemoryUnregister(self, message: bytes, context: Any) -> bytes:
        self._memory.unregister(_read(pb.SystemSharedMemoryUnregisterRequest, message).name)
        return bytes(pb.SystemSharedMemoryUnregisterResponse().SerializeToString())

    async def SystemSharedMemoryStatus(self, message: bytes, context: Any) -> bytes:
        told = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.status(_read(pb.SystemSharedMemoryStatusRequest, message).name):
            entry = told.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.size
        return bytes(told.SerializeToString())


_CONTENT_TYPE = {"Content-Type": "application/grpc"}


def _read(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise ServerError.of(400, f"not a {kind.__name__}", code="malformed_request") from error


def _headers(context: Any) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _metadata(reply: Reply) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in reply.headers.items() if name != "Content-Type")


async def _abort(context: Any, error: ServerError) -> bytes:
    trailing = [(grpc_status.ERROR_CODE, error.code)] if error.code else []
    if error.retry_after_s is not None:
        trailing.append(("retry-after", f"{error.retry_after_s:.3f}"))
    code = grpc.StatusCode[grpc_status.status_code(error.status)]
    await context.abort(code, error.message, tuple(trailing))
    raise AssertionError("abort raises")
