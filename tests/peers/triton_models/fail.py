"""Triton, Python backend: a model that always fails."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse(error=pb.TritonError("this model always fails")) for _ in requests]
