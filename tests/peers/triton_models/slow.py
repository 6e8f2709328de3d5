"""Triton, Python backend: ``x`` → ``y`` after a while."""

import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(3)
        return [
            pb.InferenceResponse([pb.Tensor("y", pb.get_input_tensor_by_name(each, "x").as_numpy())])
            for each in requests
        ]
