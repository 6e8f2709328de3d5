"""Triton, Python backend: what came beside the tensors, as JSON. (Triton hands on those headers that it is told to.)"""

import json

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("told", self._told(each))]) for each in requests]

    def _told(self, request):
        parameters = json.loads(request.parameters())
        headers = {
            name: parameters.pop(name) for name in list(parameters) if name.lower().startswith("x-test")
        }
        told = {"id": request.request_id(), "parameters": parameters, "headers": headers}
        return np.array([json.dumps(told).encode()], dtype=object)
