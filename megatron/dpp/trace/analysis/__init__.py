"""What a trace says: where the time went, who was slow, and what a change would gain.

``profiling/report.py`` and ``tools/monitor.py`` are the callers; both only format what they get
from here.
"""
