"""What jobs are meant to be, and the code version of each execution."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("executions", sa.Column("code_version", sa.Text(), nullable=True))
    op.create_table(
        "desired_states",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("desired", sa.String(length=16), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("reached", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("upgrade", sa.Text(), nullable=True),
        sa.Column("preflight", sa.Text(), nullable=True),
        sa.Column("alert", sa.Text(), nullable=True),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("changed_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_desired_states_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_desired_states")),
    )


def downgrade() -> None:
    op.drop_table("desired_states")
    op.drop_column("executions", "code_version")
