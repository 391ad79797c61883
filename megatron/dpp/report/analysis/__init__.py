"""Analysis of a trace: times, stragglers, links, and the summary that the commands print."""
