"""Why streams downstream may keep rows that a rewind undid."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("timelines", sa.Column("accepted", sa.Text()))


def downgrade() -> None:
    op.drop_column("timelines", "accepted")
