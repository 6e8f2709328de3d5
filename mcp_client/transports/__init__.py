"""Bytes on the wire: a transport carries one exchange; it knows nothing of tensors."""
