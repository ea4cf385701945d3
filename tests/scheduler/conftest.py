from hypothesis import settings

# pytest tests/scheduler --hypothesis-profile=thorough: minutes instead of seconds
settings.register_profile("thorough", max_examples=1000, stateful_step_count=80)
