"""What `/metrics` says, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.serving.answer import Answer
from jaxkv.serving.engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """The engine's load as it is when asked, and how long requests took."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.registry = CollectorRegistry()

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"jaxkv_{name}_seconds", what, buckets=SECONDS, registry=self.registry)

        self._queued = histogram("request_queue", "From a request's arrival to the first block of its prompt")
        self._first = histogram("time_to_first_token", "From a request's arrival to its first token")
        self._each = histogram("time_per_output_token", "Mean time between a request's tokens behind the first")
        self._whole = histogram("request", "From a request's arrival to its end")
        self.registry.register(self)

    def ended(self, answer: Answer) -> None:
        """An answer that has ended; its times count."""
        times = answer.times
        if times.started is not None:
            self._queued.observe(times.started - times.arrived)
        if times.first is not None:
            self._first.observe(times.first - times.arrived)
        if times.ended is not None:
            self._whole.observe(times.ended - times.arrived)
            if times.first is not None and len(answer.tokens) > 1:
                self._each.observe((times.ended - times.first) / (len(answer.tokens) - 1))

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters of now."""
        engine, load = self._engine, self._engine.load
        for name, what, value in (
            ("requests_waiting", "Requests in the queue", load.queued),
            ("rows", "Rows of the running batch", load.rows),
            ("rows_taken", "Rows with a request", load.taken),
            ("cache_bytes", "Bytes of all rows' caches, whatever runs in them", engine.nbytes),
        ):
            yield GaugeMetricFamily(f"jaxkv_{name}", what, value=value)
        for name, what, value in (
            ("prompt_tokens", "Prompt tokens of ended requests", load.prompt_tokens),
            ("generation_tokens", "New tokens of ended requests", load.new_tokens),
            ("evicted_tokens", "Tokens that ended requests saw and their caches held no more", load.evicted),
        ):
            yield CounterMetricFamily(f"jaxkv_{name}", what, value=value)
        told = engine.speculation
        if told is not None:
            yield GaugeMetricFamily("jaxkv_tokens_per_pass", "Tokens that a row got from a pass", told.tokens_per_pass)
            passes = CounterMetricFamily("jaxkv_passes", "Passes of the model over all rows", labels=["kind"])
            passes.add_metric(["drafts"], told.trees)
            passes.add_metric(["plain"], told.steps)
            yield passes
        requests = CounterMetricFamily("jaxkv_requests", "Ended requests", labels=["finish"])
        for finish, count in load.ended.items():
            requests.add_metric([finish], count)
        yield requests
