"""`RestartStrategies`, PyFlink's factory of restart strategies, and the choice of the effective strategy.

The strategies, their defaults and their limits are those of Flink 1.20
(https://nightlies.apache.org/flink/flink-docs-release-1.20/docs/ops/state/task_failure_recovery/).
The same strategy decides on a restart within a run and on one in a new run, based on one durable
history.
"""

from datetime import timedelta

from dagster_ckpt.config.validation import INT_MAX
from dagster_ckpt.errors import OptionTypeError
from dagster_ckpt.policies import restart as exponential_delay
from dagster_ckpt.policies import restart as kinds
from dagster_ckpt.policies.restart import (
    DecidingRestartStrategy,
    ExponentialDelayRestartStrategyConfiguration,
    RestartStrategyConfiguration,
)


class RestartStrategies:
    """Creates restart strategies under PyFlink's names. Durations are ms or timedeltas.

    Example:
        >>> RestartStrategies.fixed_delay_restart(3, 1000).get_description()
        'Restart with fixed delay (PT1S). #3 restart attempts.'
    """

    NoRestartStrategyConfiguration = kinds.NoRestartStrategyConfiguration
    FixedDelayRestartStrategyConfiguration = kinds.FixedDelayRestartStrategyConfiguration
    FailureRateRestartStrategyConfiguration = kinds.FailureRateRestartStrategyConfiguration
    FallbackRestartStrategyConfiguration = kinds.FallbackRestartStrategyConfiguration

    @staticmethod
    def no_restart() -> kinds.NoRestartStrategyConfiguration:
        """Never restart."""
        return kinds.NoRestartStrategyConfiguration()

    @staticmethod
    def fall_back_restart() -> kinds.FallbackRestartStrategyConfiguration:
        """Let the deployment decide."""
        return kinds.FallbackRestartStrategyConfiguration()

    @staticmethod
    def fixed_delay_restart(
        restart_attempts: int, delay_between_attempts: int | timedelta
    ) -> kinds.FixedDelayRestartStrategyConfiguration:
        """Restart a limited number of times, each after the same delay.

        Raises:
            OptionTypeError: A value has the wrong type. A negative one is refused by `validate`, as
                PyFlink refuses it when the stream starts.
        """
        return kinds.FixedDelayRestartStrategyConfiguration(
            restart_attempts,
            delay_between_attempts,
        )

    @staticmethod
    def failure_rate_restart(
        failure_rate: int, failure_interval: int | timedelta, delay_interval: int | timedelta
    ) -> kinds.FailureRateRestartStrategyConfiguration:
        """Restart unless an interval contains more failures than the rate allows.

        Raises:
            OptionTypeError: A value has the wrong type. One out of range is refused by `validate`,
                as PyFlink refuses it when the stream starts.
        """
        return kinds.FailureRateRestartStrategyConfiguration(
            failure_rate,
            failure_interval,
            delay_interval,
        )

    @staticmethod
    def exponential_delay_restart(
        initial_backoff: int | timedelta = 1_000,
        max_backoff: int | timedelta = 60_000,
        backoff_multiplier: float = 1.5,
        reset_backoff_threshold: int | timedelta = 3_600_000,
        jitter_factor: float = 0.1,
        *,
        attempts_before_reset_backoff: int = INT_MAX,
    ) -> ExponentialDelayRestartStrategyConfiguration:
        """Restart with exponential back-off; the defaults are those of Flink since 1.19.

        Raises:
            OptionError: A value is out of range.
            OptionTypeError: A value has the wrong type.
        """
        return ExponentialDelayRestartStrategyConfiguration(
            exponential_delay.INITIAL_BACKOFF.checked(initial_backoff),
            exponential_delay.MAX_BACKOFF.checked(max_backoff),
            backoff_multiplier,
            exponential_delay.RESET_THRESHOLD.checked(reset_backoff_threshold),
            jitter_factor,
            attempts_before_reset_backoff,
        )


def effective_restart_strategy(
    configured: RestartStrategyConfiguration | None,
    *,
    deployment: RestartStrategyConfiguration | None = None,
    checkpointing_enabled: bool,
) -> DecidingRestartStrategy:
    """Return the effective strategy: the stream's, else the deployment's, else Flink's default.

    The default is exponential delay if periodic checkpointing is on. If it is off, the default is
    no restart, because there may be nothing to restart from.

    Args:
        configured: The stream's; None or a fallback means the deployment's.
        deployment: The deployment's; None or a fallback means the default.
        checkpointing_enabled: Whether the stream takes periodic checkpoints.

    Raises:
        OptionError: A value of the strategy is out of range.
        OptionTypeError: It is not a restart strategy.
    """
    for option, strategy in (("restart_strategy", configured), ("deployment restart_strategy", deployment)):
        if isinstance(strategy, DecidingRestartStrategy):
            strategy.validate()
            return strategy
        if strategy is not None and not isinstance(strategy, kinds.FallbackRestartStrategyConfiguration):
            raise OptionTypeError(
                f"{option} is {strategy!r} ({type(strategy).__name__}), but must be a value made by RestartStrategies."
            )
    if checkpointing_enabled:
        return ExponentialDelayRestartStrategyConfiguration()
    return kinds.NoRestartStrategyConfiguration()
