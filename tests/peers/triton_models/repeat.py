"""Triton, Python backend, decoupled: each element of ``x`` in a response of its own; a negative one is an error."""

import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for element in pb.get_input_tensor_by_name(request, "x").as_numpy().ravel():
                time.sleep(0.01)
                if element < 0:
                    error = pb.TritonError("this model takes no negative numbers")
                    sender.send(pb.InferenceResponse(error=error))
                    break
                sender.send(pb.InferenceResponse([pb.Tensor("y", np.array([element], np.int32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
