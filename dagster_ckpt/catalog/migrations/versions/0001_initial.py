"""All tables, as the code defines them: until the first release there is one revision.

A second revision must first pin these tables here, because `metadata` then describes the newer ones.
"""

import uuid

from alembic import op

from dagster_ckpt.catalog.tables import deployment, event_counter, metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection)
    connection.execute(event_counter.insert().values(id=1, last_sequence=0))
    # Snapshots carry the id of the deployment whose catalog recorded them.
    connection.execute(deployment.insert().values(deployment_id=str(uuid.uuid4())))


def downgrade() -> None:
    metadata.drop_all(op.get_bind())
