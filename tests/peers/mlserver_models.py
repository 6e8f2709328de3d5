"""MLServer: the cases' models as custom runtimes. MLServer imports this in its own environment."""

import asyncio
import json
from typing import ClassVar

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceResponse, ResponseOutput


class _Model(MLModel):
    async def predict(self, payload):
        outputs = await self.run(payload)
        return InferenceResponse(
            id=payload.id, model_name=self.name, model_version=self.version, outputs=outputs
        )


class Identity(_Model):
    """``x`` → ``y`` as MLServer read it: its codecs would add an axis to a vector, so none is used."""

    async def run(self, payload):
        x = payload.inputs[0]
        return [ResponseOutput(name="y", datatype=x.datatype, shape=x.shape, data=x.data)]


class Add(_Model):
    """``a``, ``b`` → ``sum``, ``difference``, with MLServer's codec for numpy."""

    async def run(self, payload):
        tensors = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        a, b = tensors["a"], tensors["b"]
        return [NumpyCodec.encode_output("sum", a + b), NumpyCodec.encode_output("difference", a - b)]


class Fail(_Model):
    async def run(self, payload):
        raise InferenceError("this model always fails")


class Slow(_Model):
    """``x`` → ``y`` after a while."""

    async def run(self, payload):
        await asyncio.sleep(3)
        x = payload.inputs[0]
        return [ResponseOutput(name="y", datatype=x.datatype, shape=x.shape, data=x.data)]


class Echo(_Model):
    """What came beside the tensors, as JSON."""

    async def run(self, payload):
        parameters = payload.parameters.model_dump() if payload.parameters else {}
        headers = parameters.pop("headers", None) or {}
        told = {"id": payload.id, "parameters": parameters, "headers": headers}
        return [StringCodec.encode_output("told", [json.dumps(told, default=str)])]


class Sequence(_Model):
    """The sum of what came so far in a sequence: ``x`` → ``total``."""

    totals: ClassVar[dict] = {}

    async def run(self, payload):
        parameters = payload.parameters.model_dump()
        key = parameters["sequence_id"]
        before = 0 if parameters.get("sequence_start") else self.totals[key]
        total = self.totals[key] = before + NumpyCodec.decode_input(payload.inputs[0])
        if parameters.get("sequence_end"):
            del self.totals[key]
        return [
            ResponseOutput(
                name="total", datatype="INT32", shape=list(total.shape), data=total.ravel().tolist()
            )
        ]


class Repeat(MLModel):
    """Each element of ``x`` in a response of its own."""

    async def predict_stream(self, payloads):
        async for payload in payloads:
            for element in NumpyCodec.decode_input(payload.inputs[0]).ravel():
                await asyncio.sleep(0.01)
                if element < 0:
                    raise InferenceError("this model takes no negative numbers")
                outputs = [NumpyCodec.encode_output("y", np.array([[element]], np.int32))]
                yield InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)
