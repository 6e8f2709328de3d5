"""Triton, Python backend behind the sequence batcher: the sum of what came so far in a sequence."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self._totals = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            begins = pb.get_input_tensor_by_name(request, "START").as_numpy().any()
            total = (0 if begins else self._totals[key]) + pb.get_input_tensor_by_name(
                request, "x"
            ).as_numpy()
            self._totals[key] = total
            responses.append(pb.InferenceResponse([pb.Tensor("total", total)]))
        return responses
