"""One running stream: start, supervision, checkpoint attempts, restarts in place, and the record of its end."""
