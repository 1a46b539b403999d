"""The process that owns an engine: close it, send every step to its workers, open it."""
