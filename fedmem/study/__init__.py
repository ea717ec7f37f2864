"""From a study's YAML to executed notebooks: jobs, plan, estimates, preflight, runner, audit."""
