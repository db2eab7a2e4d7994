"""Everything that requests share: the policy, its backends, what was observed, and the decision."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from backends.base import Backend, BackendError, PromptCount
from policies import NoCandidate, NoRoute, Policy, Profile, RouterState, decide, estimate_prompt_tokens
from router.answer import Answer
from router.errors import RouterError
from router.incoming import Incoming
from router.ledger import Ledger

if TYPE_CHECKING:
    from policies import Decision


class Executor:
    """Everything a request needs; one for the SDK and the gateway."""

    def __init__(self, policy: Policy, backends: Mapping[str, Backend]) -> None:
        self.policy = policy
        self.backends = backends
        self.state = RouterState()
        self.ledger = Ledger()
        self._rng = random.Random()

    # --- decision ------------------------------------------------------------------------------------

    def profile(self, incoming: Incoming) -> tuple[Profile, dict[str, PromptCount], dict[str, BackendError]]:
        """The request's profile; the token ids, by provider, of those that count exactly; and who refused it."""
        counts: dict[str, PromptCount] = {}
        refusals: dict[str, BackendError] = {}
        tokens_by_target: dict[str, int] = {}
        for name in self._targets_of(incoming.model):
            provider = self.policy.targets[name].provider
            backend = self.backends[provider]
            if provider not in counts and provider not in refusals:
                try:
                    counted = backend.count_prompt(incoming.surface, incoming.body)
                except BackendError as error:
                    refusals[provider] = error
                    continue
                if counted is None:
                    continue
                counts[provider] = counted
            if provider in counts:
                tokens_by_target[name] = counts[provider].tokens
            self.state[name].context = backend.context_limit()
        exact = next(iter(tokens_by_target.values()), None)
        profile = Profile(
            model=incoming.model,
            prompt_tokens=exact if exact is not None else estimate_prompt_tokens(incoming.surface, incoming.body),
            exact=exact is not None,
            max_tokens=incoming.max_tokens,
            goals=incoming.goals,
            stream=incoming.stream,
            tokens_by_target=tokens_by_target,
        )
        return profile, counts, refusals

    def _targets_of(self, route: str) -> list[str]:
        """The targets of a route in the order its rules name them."""
        rules = self.policy.routes.get(route, ())
        return list(dict.fromkeys(name for rule in rules for name in rule.candidates))

    def decide(self, profile: Profile) -> Decision:
        """Raises RouterError where no route or no candidate can take the request."""
        try:
            return decide(self.policy, profile, self.state, self._rng)
        except NoRoute as error:
            raise RouterError(str(error), status=404, code="model_not_found", param="model") from None
        except NoCandidate as error:
            raise RouterError(
                str(error), status=400, code="context_length_exceeded", param="messages", decision=error.decision
            ) from None

    # --- attempts ------------------------------------------------------------------------------------

    async def run(self, incoming: Incoming) -> Answer:
        """The answer, once its first content (streamed) or all of it is there. Raises RouterError."""
        answer = Answer(self, incoming)
        self.ledger.metrics.in_flight.inc()
        try:
            await answer.start()
        except BaseException as error:
            await answer.close(error)
            raise
        return answer
