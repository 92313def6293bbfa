"""Other people's result formats: AIPerf's JSON, InferenceX rows, llm-d benchmark report 0.2.1. Each writes what the format can hold, and
says the rest."""
