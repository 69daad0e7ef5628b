"""Everything that users see of a job: the terminal's lines, the event log, metrics, the page, the history."""
