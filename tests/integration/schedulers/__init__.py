"""The sensors for schedulers, in environments with the real Airflow and the real Dagster."""
