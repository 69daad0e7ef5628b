"""Translation of settings for the core, and for the start of workers.

Owns no setting. Knows nothing of the running job.
"""

from __future__ import annotations

from elastic_driver.core.membership import Policy
from elastic_driver.core.state import LAST_CALL_S
from elastic_driver.settings.settings import AUTO_ON_CHANGE, Settings
from elastic_driver.words import OnChange, Sizing


def policy_of(settings: Settings, on_change: OnChange = OnChange.IN_PLACE) -> Policy:
    """Return the core's limits, from the settings.

    Args:
        settings: the user's settings.
        on_change: the first kind of the workers.
    """
    is_open = settings.on_change == AUTO_ON_CHANGE
    # If hosts join by themselves, a job that has blacklisted one would wait for another.
    retries = settings.reset_limit is not None or settings.accept_agents
    # Otherwise a command that fails at once would be retried for minutes, though nobody has asked for that; or the job
    # would wait for hosts that cannot come.
    is_fixed = settings.hosts is not None and not settings.accept_agents
    asks_for_tries = settings.reset_limit is not None or settings.cooldown_range_s is not None
    said = None if settings.nodes is None else settings.nodes.conf.get("last_call_timeout")
    return Policy(
        num_proc=settings.num_proc,
        min_num_proc=settings.min_num_proc,
        max_num_proc=settings.max_num_proc,
        elastic_timeout_s=settings.elastic_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        reset_limit=settings.reset_limit,
        reset_window_s=settings.reset_window_s,
        cooldown_range_s=settings.cooldown_range_s,
        durable=settings.durable_dir is not None,
        num_standby=settings.num_standby,
        num_proc_multiple=settings.num_proc_multiple,
        ranks_per_host_multiple=settings.ranks_per_host_multiple,
        protect=settings.protect,
        on_change=on_change,
        becomes_in_place=is_open and on_change.restarts,
        must_init=not is_open,
        retries_starts=retries,
        blames_hosts=settings.blames_hosts or not retries,
        last_call_s=LAST_CALL_S if said is None else float(said),
        ends_at_start=not asks_for_tries and (is_fixed or settings.sizing is not Sizing.NP),
        sizing=settings.sizing,
        num_parameter_servers=settings.num_parameter_servers,
        restart_chief=settings.restart_chief,
        fixed_hosts=is_fixed,
    )


def starts_again(settings: Settings) -> bool:
    """Return whether workers may be started in the course of the job: hosts come, or failed workers are replaced."""
    return settings.elastic or bool(settings.reset_limit)
