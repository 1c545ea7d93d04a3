"""Kafka topics: Spark's own sink, and the transactional one.

A fixed number of writers share each batch. Each sends its share in one Kafka transaction, which also commits the
writer's *marker*: the offset of its own consumer group, with the query's id and the newest batch written. A share
that runs again finds its batch in the marker and writes nothing.

Two mechanisms fence a process that was replaced and does not know it yet:

- `transactional.id` names stream, topic and writer: a successor's `init_transactions` fences the former producer, and
  aborts what that has not committed.
- The marker names its *owner*. Every start first claims all markers, also those of the stream's earlier topics and ids.
  A share whose marker has another owner is refused, and so is a claim if the marker belongs to a later live directory,
  which a predecessor that may still live never shares with its successor.

A batch counts as written only if the marker has the digest of its plan. A query that the stream left for another one
(`new_query_id`) is not continued.
"""
