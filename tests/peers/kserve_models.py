"""KServe's Python server with the cases' models: ``python kserve_models.py --http_port … --grpc_port …``, in its own
environment. Its addresses are fixed to all interfaces; here it listens on the loopback interface alone.
"""

import asyncio
import json
from typing import ClassVar

import grpc
import numpy as np
import uvicorn
from kserve import InferOutput, InferResponse, Model, ModelServer
from kserve.errors import InferenceError
from kserve.utils.utils import generate_uuid

DATATYPES = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
DATATYPES += ["FP16", "FP32", "FP64", "BF16", "BYTES"]


class _Model(Model):
    def __init__(self, name):
        super().__init__(name)
        self.ready = True

    def load(self):
        self.ready = True
        return True

    async def predict(self, payload, headers=None, response_headers=None):
        outputs = []
        for name, datatype, array in await self.run(payload, headers or {}):
            output = InferOutput(name, list(array.shape), datatype)
            output.set_data_from_numpy(array, binary_data=payload.use_binary_outputs or datatype == "FP16")
            outputs.append(output)
        return InferResponse(
            payload.id or generate_uuid(),
            self.name,
            outputs,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )


class Identity(_Model):
    async def run(self, payload, headers):
        x = payload.inputs[0]
        return [("y", x.datatype, x.as_numpy())]


class Add(_Model):
    def get_input_types(self):
        return [{"name": name, "datatype": "FP32", "shape": [-1]} for name in ("a", "b")]

    def get_output_types(self):
        return [{"name": name, "datatype": "FP32", "shape": [-1]} for name in ("sum", "difference")]

    async def run(self, payload, headers):
        tensors = {each.name: each.as_numpy() for each in payload.inputs}
        a, b = tensors["a"], tensors["b"]
        return [("sum", "FP32", a + b), ("difference", "FP32", a - b)]


class Fail(_Model):
    async def run(self, payload, headers):
        raise InferenceError("this model always fails")


class Slow(Identity):
    async def run(self, payload, headers):
        await asyncio.sleep(3)
        return await super().run(payload, headers)


class Echo(_Model):
    async def run(self, payload, headers):
        told = {"id": payload.id, "parameters": _parameters(payload), "headers": dict(headers)}
        return [("told", "BYTES", np.array([json.dumps(told).encode()], dtype=object))]


class Sequence(_Model):
    totals: ClassVar[dict] = {}

    async def run(self, payload, headers):
        parameters = _parameters(payload)
        key = parameters["sequence_id"]
        before = 0 if parameters.get("sequence_start") else self.totals[key]
        self.totals[key] = total = before + payload.inputs[0].as_numpy()
        if parameters.get("sequence_end"):
            del self.totals[key]
        return [("total", "INT32", total)]


def _parameters(payload):
    """As they are over HTTP; over gRPC KServe hands out its messages."""
    parameters = dict((payload.parameters or {}).items())
    for name, value in parameters.items():
        if hasattr(value, "WhichOneof"):
            parameters[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return parameters


def _on_loopback():
    make = uvicorn.Config.__init__

    def config(self, *args, **options):
        make(self, *args, **{**options, "host": "127.0.0.1"})

    uvicorn.Config.__init__ = config
    add = grpc.aio.Server.add_insecure_port
    grpc.aio.Server.add_insecure_port = lambda self, address: add(self, address.replace("[::]", "127.0.0.1"))


if __name__ == "__main__":
    _on_loopback()
    models = [Identity(f"identity_{each.lower()}") for each in DATATYPES]
    models += [
        Add("add"),
        Fail("fail"),
        Slow("slow"),
        Echo("echo"),
        Sequence("sequence"),
        Identity("spare"),
        Identity("repeat"),
    ]
    ModelServer(grace_period=1).start(models)
