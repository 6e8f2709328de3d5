"""mcp-server: an inference server good enough to develop and test against, and to run on one box."""
