"""The loader's rarer rules, each with a policy that breaks it. The common ones are in test_loading.py."""

from __future__ import annotations

import pytest

from tests.policies.test_loading import POLICY, problems_of

_RULES = "    - {when: {class: interactive}, candidates: [tiny, mini], choose: cheapest-meeting-slo, slo: {ttft_ms: 500, at: p95}}\n"
_TARGET = "  tiny: {provider: own, expect: {ttft_ms: 300}}"
_CHECK = "  - {request: {model: chat, prompt_tokens: 60}, expect: {target: mini, class: default}}"
_PROVIDERS = 'providers:\n  openai: {type: openai, api_key: "${KEY}"}\n  own: {type: disagg, model: tiny-llm}\n'
_TARGETS = POLICY[POLICY.index("targets:") : POLICY.index("classes:")]
_ROUTES = POLICY[POLICY.index("routes:") : POLICY.index("resilience:")]
_CLASSES = POLICY[POLICY.index("classes:") : POLICY.index("routes:")]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # sections
        (_PROVIDERS, "providers: {}\n", "'providers' is empty (name at least one, such as own: {type: disagg"),
        (_PROVIDERS, "providers: [a]\n", "'providers' must be a mapping, not a list"),
        (_PROVIDERS, "", "the policy has no 'providers' (add providers:)"),
        (_TARGETS, "targets: {}\n", "'targets' is empty (name at least one, such as mini: {provider: openai"),
        (_ROUTES, "routes: {}\n", "'routes' is empty (name at least one, such as chat: ["),
        (_ROUTES, "routes: {chat: all}\n", "route 'chat' must be a list, not 'all'"),
        (_ROUTES, "routes: {chat: []}\n", "the last rule of route 'chat' must take every request that is left"),
        (_ROUTES, "routes: {chat: {resilience: {retries: 1}}}\n", "route 'chat' has no 'rules' (write it as rules: ["),
        (_ROUTES, "routes: {chat: {ruels: []}}\n", "unknown key 'ruels' in route 'chat' (did you mean 'rules'?)"),
        (_CLASSES, "classes: {}\n", "the last class must take every request that is left (end the classes with"),
        (_CLASSES, "classes: {a: {then: x}, default: {}}\n", "unknown key 'then' in class 'a'"),
        # providers and targets
        ("{type: disagg, model: tiny-llm}", "disagg", "provider 'own' must be a mapping, not 'disagg'"),
        (_TARGET, "  tiny: own", "target 'tiny' must be a mapping, not 'own'"),
        (_TARGET, "  tiny: {context: 10}", "target 'tiny' has no 'provider'"),
        (_TARGET, "  tiny: {provider: own, model: 5}", "'model' of target 'tiny' must be non-empty text, not 5"),
        (_TARGET, "  tiny: {provider: own, price: {input: 1}}", "'price' of target 'tiny' has no 'output'"),
        (_TARGET, "  tiny: {provider: own, price: 5}", "'price' of target 'tiny' must be a mapping, not 5"),
        (_TARGET, "  tiny: {provider: own, capabilities: [magic]}", "unknown capability 'magic'"),
        (_TARGET, "  tiny: {provider: own, capabilities: tools}", "'capabilities' of target 'tiny' must be a list"),
        (_TARGET, "  tiny: {provider: own, data_collection: maybe}", "unknown 'data_collection' 'maybe'"),
        (_TARGET, "  tiny: {provider: own, speed: {ttft: 3}}", "unknown key 'ttft' in 'speed' of target 'tiny'"),
        (_TARGET, "  tiny: {provider: own, speed: {spread: -1}}", "'spread' must be a number of at least 0, not -1"),
        # conditions
        ("{when: {class: interactive}", "{when: {}", "'when' of a rule of route 'chat' is empty (leave 'when' out"),
        ("{when: {class: interactive}", "{when: {prompt_tokens: {}}", "the condition on 'prompt_tokens' is empty"),
        ("{when: {class: interactive}", "{when: {class: [interactive, x]}", "unknown class 'x'"),
        ("{when: {class: interactive}", "{when: {class: []}", "the list for 'class' is empty (it would match nothing)"),
        ("{when: {class: interactive}", "{when: {class: {gte: a}}", "unknown key 'gte' in the condition on 'class'"),
        ("{when: {class: interactive}", "{when: {session: {eq: {}}}", "'session' must be text, not a mapping"),
        ("{when: {class: interactive}", "{when: {any: []}", "'any' in 'when' of a rule of route 'chat' is empty"),
        ("{when: {class: interactive}", "{when: {any: {stream: true}}", "must be a list, not a mapping"),
        ("{when: {class: interactive}", "{when: {metadata: {}}", "'metadata' is empty"),
        ("{when: {class: interactive}", "{when: {metadata: team}", "'metadata' must be a mapping, not 'team'"),
        ("{when: {class: interactive}", "{when: {needs: magic}", "unknown need 'magic'"),
        ("{when: {class: interactive}", "{when: {weekday: funday}", "unknown weekday 'funday'"),
        ("{when: {class: interactive}", "{when: {stream: maybe}", "'stream' must be true or false, not 'maybe'"),
        ("{when: {class: interactive}", "{when: {hour: -1}", "'hour' must be a number of at least 0, not -1"),
        # rules
        (_RULES, "    - 5\n", "a rule of route 'chat' must be a mapping, not 5"),
        ("slo: {ttft_ms: 500, at: p95}", "slo: {at: p95}", "has neither 'ttft_ms' nor 'tpot_ms'"),
        ("slo: {ttft_ms: 500, at: p95}", "slo: fast", "'slo' of a rule of route 'chat' must be a mapping, not 'fast'"),
        ("choose: in-order", "choose: in-order, slo: {ttft_ms: 5}", "'slo' has no effect with choose: in-order"),
        ("choose: in-order", "choose: in-order, explore: 2", "'explore' has no effect with choose: in-order (it has with"),
        ("choose: in-order", "choose: lowest-latency, explore: 101", "'explore' must be at most 100, not 101"),
        ("choose: in-order", "choose: lowest-latency, explore: -1", "'explore' must be a number of at least 0, not -1"),
        ("choose: in-order", "choose: in-order, weights: {mini: 2}", "'weights' have no effect with choose: in-order"),
        ("choose: in-order", "choose: weighted, weights: {mini: 0, tiny: 0}", "leave nobody: all are 0"),
        ("choose: in-order", "choose: weighted, weights: {nobody: 1}", "unknown key 'nobody' in 'weights'"),
        # limits, queues, hedges and breakers
        (_TARGET, "  tiny: {provider: own, limits: {queue: 5}}", "'queue' of target 'tiny' is for nothing without a 'concurrency'"),
        (_TARGET, "  tiny: {provider: own, limits: {concurrency: 0}}", "'concurrency' must be a whole number of at least 1, not 0"),
        (_TARGET, "  tiny: {provider: own, limits: {concurrency: lots}}", "'concurrency' must be a whole number of at least 1, not 'lots'"),
        (_TARGET, "  tiny: {provider: own, limits: {concurrency: 1, queue: -1}}", "'queue' must be a whole number of at least 0, not -1"),
        (_TARGET, "  tiny: {provider: own, limits: {quota: [a]}}", "'quota' must be non-empty text, not a list"),
        (_TARGET, "  tiny: {provider: own, limits: {qota: a}}", "(did you mean 'quota'?)"),
        (_CLASSES, "classes: {default: {priority: high}}\n", "'priority' must be a number, not 'high'"),
        ("retries: 1", "after_commit: retry", "unknown 'after_commit' 'retry'"),
        ("retries: 1", "max_cost_usd: 0", "'max_cost_usd' must be a number above 0, not 0"),
        ("retries: 1", "attempt_timeout_ms: 0", "'attempt_timeout_ms' must be a whole number of at least 1, not 0"),
        ("retries: 1", "keepalive_ms: 0", "'keepalive_ms' must be a whole number of at least 1, not 0"),
        ("retries: 1", "connect_timeout_ms: 0", "'connect_timeout_ms' must be a whole number of at least 1, not 0"),
        ("retries: 1", "hedge: {usd_per_hour: 1}", "'hedge' has no 'percent' (write it as {percent: 5"),
        ("retries: 1", "hedge: {percent: 0}", "'percent' must be a number above 0, not 0"),
        ("retries: 1", "hedge: {percent: 101}", "'percent' must be at most 100, not 101"),
        ("retries: 1", "hedge: 5", "'hedge' must be a mapping, not 5"),
        ("retries: 1", "breaker: {rate: 1.5}", "'rate' must be at most 1, not 1.5"),
        ("retries: 1", "breaker: {open_ms: 0}", "'open_ms' must be a whole number of at least 1, not 0"),
        ("retries: 1", "breaker: {opens: 1}", "unknown key 'opens' in 'breaker' (did you mean 'open_ms'?)"),
        (_ROUTES, "routes: {chat: {rules: [{candidates: [mini], choose: in-order}], resilience: {breaker: {failures: 1}}}}\n", "unknown key 'breaker' in 'resilience'"),
        # the rest
        ("resilience:", "timezone: Mars/Olympus\nresilience:", "unknown timezone 'Mars/Olympus' (write it as Europe/Paris"),
        ("resilience:", "overrides: [ordr]\nresilience:", "unknown override 'ordr' (did you mean 'order'?)"),
        ("resilience:", "overrides: 5\nresilience:", "'overrides' must be a list, not 5"),
        (_CHECK, "  - 5", "a check must be a mapping, not 5"),
        (_CHECK, "  - {request: {model: chat, prompt_tokens: 6}}", "a check has no 'expect'"),
        (_CHECK, "  - {request: {model: chat, prompt_tokens: 6}, expect: {}}", "'expect' of a check is empty"),
        (_CHECK, "  - {request: {model: chat, prompt_tokens: 6, stream: 5}, expect: {class: default}}", "'stream' must be true"),
        # what YAML itself would let pass
        ("version: 1", "version: 1\n? [a]\n: b", "a key must be plain text, not a list or a mapping"),
        ("version: 1", "version: 1\n<<: {x: 1}", "merge keys (<<) are not part of the policy language"),
        ("retries: 1", "retries: !!map {}", "'retries' must be a whole number"),
        ("{retries: 1, deadline_ms: 5000}", "!other {}", "the tag '!other' is not part of the policy language"),
        ("retries: 1", "retries: \"${1X}\"", "'${' does not begin a variable reference"),
        ("retries: 1", "retries: &a [*a]", "an alias (*) inside the node it names"),
        ("retries: 1", "retries: 0o9", "'retries' must be a whole number of at least 0, not '0o9'"),
        ("retries: 1", "retries: 1.5.2", "'retries' must be a whole number of at least 0"),
        ("version: 1", "version: 1\n---\nversion: 1", "(one file is one policy: remove the '---')"),
        ("version: 1", "version: 1 : 2", "(check the indentation, and quote text that has ': ' in it)"),
        ("version: 1", "version: 1\x07", "a control character or broken encoding"),
    ],
)  # fmt: skip
def test_each_rule_of_the_loader_has_a_policy_that_breaks_it(old: str, new: str, problem: str) -> None:
    assert old in POLICY
    found = problems_of(POLICY.replace(old, new, 1))
    assert any(problem in one for one in found), found


def test_a_file_that_stands_for_a_huge_one_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    (problem,) = problems_of("\n".join(lines))
    assert "the policy is larger than 100000 nodes, aliases included" in problem


def test_nesting_without_end_is_refused() -> None:
    (problem,) = problems_of("a: " + "[" * 3000 + "]" * 3000)
    assert "nested too deeply" in problem
