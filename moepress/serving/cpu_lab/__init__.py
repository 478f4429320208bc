"""SGLang on a CPU, for tests and demonstrations. Holds files for SGLang's environment; nothing here is for ours."""
