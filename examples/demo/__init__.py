"""The demo: readers turn pages, an OCR model reads each page, the client's cache and prefetch hide the wait, servers die.

python -m examples.demo [--quick] [--json] [--out FOLDER]
"""
