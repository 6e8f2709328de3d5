"""Read by Python as it starts on the emulated machine: a child has to go through the emulator as well."""

import os
import sys

sys.executable = os.environ["ARM64_PYTHON"]
