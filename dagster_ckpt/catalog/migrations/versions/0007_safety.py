"""Deployments, where state came from, holds, and what a recovery has tried."""

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _leases()
    _deployment()
    _recovery()
    _holds()


def _leases() -> None:
    pass


def _deployment() -> None:
    pass


def _recovery() -> None:
    pass


def _holds() -> None:
    pass


def downgrade() -> None:
    pass
