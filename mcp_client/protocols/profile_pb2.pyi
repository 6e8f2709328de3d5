from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("seq", "t", "session", "path", "route", "fp", "model", "source", "latency_ms", "bytes", "prefetch_id", "outcome")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    FP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    seq: int
    t: float
    session: str
    path: str
    route: str
    fp: str
    model: str
    source: str
    latency_ms: float
    bytes: int
    prefetch_id: str
    outcome: str
    def __init__(self, seq: _Optional[int] = ..., t: _Optional[float] = ..., session: _Optional[str] = ..., path: _Optional[str] = ..., route: _Optional[str] = ..., fp: _Optional[str] = ..., model: _Optional[str] = ..., source: _Optional[str] = ..., latency_ms: _Optional[float] = ..., bytes: _Optional[int] = ..., prefetch_id: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("batch_id", "client_id", "sdk", "sent_at", "events")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SDK_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    client_id: str
    sdk: str
    sent_at: str
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, batch_id: _Optional[str] = ..., client_id: _Optional[str] = ..., sdk: _Optional[str] = ..., sent_at: _Optional[str] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("batches",)
    class Rejected(_message.Message):
        __slots__ = ("index", "error")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        index: int
        error: str
        def __init__(self, index: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
    class Batch(_message.Message):
        __slots__ = ("batch_id", "accepted", "duplicates", "rejected")
        BATCH_ID_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        DUPLICATES_FIELD_NUMBER: _ClassVar[int]
        REJECTED_FIELD_NUMBER: _ClassVar[int]
        batch_id: str
        accepted: int
        duplicates: int
        rejected: _containers.RepeatedCompositeFieldContainer[ReportResponse.Rejected]
        def __init__(self, batch_id: _Optional[str] = ..., accepted: _Optional[int] = ..., duplicates: _Optional[int] = ..., rejected: _Optional[_Iterable[_Union[ReportResponse.Rejected, _Mapping]]] = ...) -> None: ...
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[ReportResponse.Batch]
    def __init__(self, batches: _Optional[_Iterable[_Union[ReportResponse.Batch, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("profile_etag", "policy_version", "max_bytes", "min_interval_s")
    PROFILE_ETAG_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    profile_etag: str
    policy_version: int
    max_bytes: int
    min_interval_s: float
    def __init__(self, profile_etag: _Optional[str] = ..., policy_version: _Optional[int] = ..., max_bytes: _Optional[int] = ..., min_interval_s: _Optional[float] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("profile", "policy")
    class Profile(_message.Message):
        __slots__ = ("etag", "json")
        ETAG_FIELD_NUMBER: _ClassVar[int]
        JSON_FIELD_NUMBER: _ClassVar[int]
        etag: str
        json: bytes
        def __init__(self, etag: _Optional[str] = ..., json: _Optional[bytes] = ...) -> None: ...
    class Policy(_message.Message):
        __slots__ = ("version", "json")
        VERSION_FIELD_NUMBER: _ClassVar[int]
        JSON_FIELD_NUMBER: _ClassVar[int]
        version: int
        json: bytes
        def __init__(self, version: _Optional[int] = ..., json: _Optional[bytes] = ...) -> None: ...
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    profile: WatchResponse.Profile
    policy: WatchResponse.Policy
    def __init__(self, profile: _Optional[_Union[WatchResponse.Profile, _Mapping]] = ..., policy: _Optional[_Union[WatchResponse.Policy, _Mapping]] = ...) -> None: ...
