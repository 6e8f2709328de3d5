"""The edge: ONNX models on this machine, run when no server answers in time."""
