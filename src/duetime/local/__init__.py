"""What this machine needs for a Kafka of its own: Java, the jars, and a broker that runs here."""
