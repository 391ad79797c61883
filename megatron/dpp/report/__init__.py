"""Analysis of a finished or running run: merged traces, what-if, pages, commands."""
