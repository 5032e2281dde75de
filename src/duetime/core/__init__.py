"""Messages, schedules, the timer wheel and settings: plain Python, without Kafka or Spark."""
