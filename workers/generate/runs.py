"""From admissions to rows, and from sampled tokens to outputs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocol.errors import HeadraceError
from headrace.protocol.generate import GenerateRequest
from headrace.protocol.wire import TokenChoice, TokenChunk, TokenLogprobEntry, TokenLogprobs, Usage
from headrace.workers.generate import noise
from headrace.workers.generate.engine import Admission, ChoiceSoFar, End, Output
from headrace.workers.generate.row import Ending, Finish, Row, Sampling
from headrace.workers.generate.scheduler import Scheduler


@dataclass(slots=True)
class Run:
    """A request being served: its rows that go on, and how many tokens it has made, all choices together."""

    request: GenerateRequest
    rows: list[Row]
    made: int
    tell_prompt: bool
    tell_usage: bool

    def usage(self, made: int) -> Usage:
        prompt = len(self.request.token_ids)
        return Usage(prompt_tokens=prompt, total_tokens=prompt + made, completion_tokens=made)


class Runs:
    """The runs of one engine. What a step makes of them gathers here until ``collect``."""

    def __init__(self, scheduler: Scheduler, *, max_model_len: int, eos: frozenset[int]) -> None:
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._eos = eos
        self._runs: dict[str, Run] = {}
        self._chunks: dict[str, list[TokenChunk]] = {}
        self._errors: dict[str, HeadraceError] = {}

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    @property
    def busy(self) -> bool:
        """Whether a step has something to do: rows to compute or outputs to tell."""
        return bool(self._chunks or self._scheduler.busy)

    def open(self, admission: Admission) -> None:
        """Queues a row for each choice that goes on. A run without one ends at the next ``collect``.

        Raises ValueError if the run is open.
        """
        request = admission.request
        if admission.run in self._runs:
            raise ValueError(f"run {admission.run} was admitted already")
        run = Run(
            request=request,
            rows=[],
            made=sum(len(choice.token_ids) for choice in admission.resume),
            tell_prompt=bool(request.return_token_ids) and not admission.resume,
            tell_usage=bool(request.stream_options and request.stream_options.continuous_usage_stats),
        )
        self._runs[admission.run] = run
        so_far = {choice.index: choice for choice in admission.resume}
        ending = ending_of(request, eos=self._eos, max_model_len=self._max_model_len)
        for index in range(request.sampling_params.n):
            choice = so_far.get(index, ChoiceSoFar(index, ()))
            if choice.finish_reason is None:
                self._continue(admission.run, run, choice, ending)
        if not run.rows:
            self._chunks.setdefault(admission.run, [])

    def _continue(self, name: str, run: Run, choice: ChoiceSoFar, ending: Ending) -> None:
        row = Row(
            run=name,
            index=choice.index,
            tokens=[*run.request.token_ids, *choice.token_ids],
            prompt=len(run.request.token_ids),
            ending=ending,
            sampling=sampling_of(run.request, run=name, choice=choice.index),
            priority=run.request.priority,
            leader=run.rows[0] if run.rows else None,
        )
        if choice.token_ids and (finish := ending.reached(row.made, row.tokens[-1])):
            self._tell(run, row, [], None, finish)
            return
        run.rows.append(row)
        self._scheduler.add(row)

    def close(self, name: str) -> None:
        """Forgets a run and what it has not told yet; its rows and blocks are free at once."""
        run = self._runs.pop(name, None)
        if run is not None:
            for row in run.rows:
                self._scheduler.remove(row)
            self._chunks.pop(name, None)
            self._errors.pop(name, None)

    def clear(self) -> None:
        """Forgets every run."""
        for name in list(self._runs):
            self.close(name)

    def take(self, row: Row, token: int, logprob: TokenLogprobEntry | None = None) -> None:
        """A row has a new token."""
        run = self._runs[row.run]
        run.made += 1
        finish = row.take(token)
        if finish is not None:
            self._scheduler.remove(row)
            run.rows.remove(row)
        self._tell(run, row, [token], logprob, finish)

    def _tell(
        self, run: Run, row: Row, tokens: list[int], logprob: TokenLogprobEntry | None, finish: Finish | None
    ) -> None:
        choice = TokenChoice(
            index=row.index,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            token_ids=tokens,
            logprobs=TokenLogprobs(content=[logprob]) if logprob else None,
        )
        chunk = TokenChunk(
            request_id=run.request.request_id,
            choices=[choice],
            usage=run.usage(row.made) if run.tell_usage else None,
            prompt_token_ids=run.request.token_ids if run.tell_prompt else None,
        )
        run.tell_prompt = False
        self._chunks.setdefault(row.run, []).append(chunk)

    def fail(self, row: Row, error: HeadraceError) -> None:
        """The row cannot go on, and so its run ends at the next ``collect``."""
        self._errors[row.run] = error
        self._chunks.setdefault(row.run, [])

    def collect(self) -> list[Output]:
        """What there is to tell, run by run. Runs that ended are forgotten."""
        chunks, self._chunks = self._chunks, {}
        outputs = []
        for name, made in chunks.items():
            end = self._end(name)
            if end is not None:
                self.close(name)
            outputs.append(Output(name, made, end))
        return outputs

    def _end(self, name: str) -> End | None:
        if name in self._errors:
            return End(error=self._errors[name])
        run = self._runs[name]
        return None if run.rows else End(usage=run.usage(run.made))


def ending_of(request: GenerateRequest, *, eos: frozenset[int], max_model_len: int) -> Ending:
    """When a row of this request is over. An absent max_tokens means up to the model's length."""
    params = request.sampling_params
    room = max_model_len - len(request.token_ids)
    return Ending(
        limit=room if params.max_tokens is None else min(room, params.max_tokens),
        minimum=params.min_tokens,
        eos=frozenset() if params.ignore_eos else eos,
        stops=frozenset(params.stop_token_ids),
    )


def sampling_of(request: GenerateRequest, *, run: str, choice: int) -> Sampling:
    """How this choice's tokens are chosen. A request without a seed gets one from its run, so that it can resume."""
    params = request.sampling_params
    seed = noise.seed_of(run) if params.seed is None else params.seed
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        bias=params.logit_bias or {},
        allowed=tuple(params.allowed_token_ids) if params.allowed_token_ids else None,
        logprobs=params.logprobs,
        noise=noise.stream(seed, choice),
    )
