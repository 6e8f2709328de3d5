"""Triton, Python backend: ``a``, ``b`` → ``sum``, ``difference``."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb.get_input_tensor_by_name(request, name).as_numpy() for name in "ab")
            outputs = [pb.Tensor("sum", a + b), pb.Tensor("difference", a - b)]
            wanted = request.requested_output_names()
            responses.append(pb.InferenceResponse([each for each in outputs if each.name() in wanted]))
        return responses
